"""Lab host: one worker process per board. The worker attaches to the farm's gateway and runs the board's jobs."""
