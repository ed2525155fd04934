"""Stages of a case, from a model file to a stored verdict."""
