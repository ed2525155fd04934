"""How fast a program is on a board, and whether another one is faster: what `hil bench` does."""
