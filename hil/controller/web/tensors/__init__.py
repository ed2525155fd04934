"""Data of the tensor pages."""
