"""The server process of `hil web`."""
