"""Operators computed in float64 from their specifications, using numpy and no code of any runtime."""
