"""Scores of a model on a dataset, and statistics of paired scores."""
