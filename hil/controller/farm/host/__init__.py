"""Lab host: one worker process per board. It attaches to the farm's gateway and runs the board's jobs."""
