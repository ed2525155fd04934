"""Resolve a board's name and open the board."""
