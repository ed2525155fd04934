"""Compare the measurements of two commits."""
