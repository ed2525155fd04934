"""Where a model goes wrong on a board: its layers one by one, and its intermediates in one run of the whole."""
