"""Measurement of a board's peaks: operations per second, and bytes per second of the memory."""
