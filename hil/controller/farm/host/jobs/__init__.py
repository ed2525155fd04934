"""Jobs on a board: files, library calls and commands, and results."""
