"""Measure a board's power with meters: read samples, and compute the energy of measurement windows."""
