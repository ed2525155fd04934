"""Conditions, clocks and grades of measurements on a board."""
