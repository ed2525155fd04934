"""Sizes of symbolic dimensions."""
