"""Run the stages of a case, from a model file to a stored verdict."""
