"""Evaluation of a model on a dataset: `hil eval`."""
