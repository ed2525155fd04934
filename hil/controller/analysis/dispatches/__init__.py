"""Run each dispatch of a compiled IREE program separately."""
