"""Boards of a run, shared by its cases."""
