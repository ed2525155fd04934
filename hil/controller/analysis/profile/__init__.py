"""Profiles: where the time of a run goes, operation by operation, on the board and on the host, on one clock."""
