"""Find the first wrong layer of a model on a board: layer by layer, and in one run with all intermediates."""
