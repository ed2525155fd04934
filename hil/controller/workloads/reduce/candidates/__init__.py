"""Smaller models that may still fail."""
