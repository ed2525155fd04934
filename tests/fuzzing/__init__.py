"""Fuzzers: inputs that nobody would make on purpose, for everything of hil that reads what others wrote."""
