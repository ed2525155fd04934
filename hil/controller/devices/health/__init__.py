"""Care for a board: what it lacks, its power, and what went on with it during a run."""
