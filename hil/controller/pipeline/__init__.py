"""The stages of a case, from a model's file to a stored verdict."""
