"""A lab host: for each of its boards a process that attends the farm's gateway and does what the board is given."""
