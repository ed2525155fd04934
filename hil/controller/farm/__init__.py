"""Lab farm: one job queue for many boards and many users (docs/farm.md)."""
