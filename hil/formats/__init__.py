"""What the host and the board both know of a runtime's files and values."""
