"""Plain `ssh` and `hil` with the same files: a user's home directory, the servers, and misbehaving ssh agents."""
