"""Axes of a search: lists of candidates, and how to test each."""
