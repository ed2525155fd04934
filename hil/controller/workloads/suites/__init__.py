"""Suites: many cases through one flow, on one board or several, with a record of each."""
