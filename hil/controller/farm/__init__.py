"""The lab farm: one queue for many boards and many users (docs/farm.md)."""
