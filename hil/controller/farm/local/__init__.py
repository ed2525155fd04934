"""A farm on this machine."""
