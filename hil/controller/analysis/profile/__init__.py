"""Profiles: operation times in a run, on the board and on the host, on a common clock."""
