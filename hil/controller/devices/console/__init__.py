"""Read a board's console: open links, split lines, share them between processes, and find causes of failures."""
