"""Stored rows of the farm: access, events, case results, presence and queries."""
