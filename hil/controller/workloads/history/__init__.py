"""Collect entries of the history from stored runs, and from files of other tools."""
