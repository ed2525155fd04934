"""Plain `ssh` and `hil` on the same files: a user's home, the servers, and agents that misbehave."""
