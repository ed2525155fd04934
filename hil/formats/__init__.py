"""Runtime file formats and values, for host and board."""
