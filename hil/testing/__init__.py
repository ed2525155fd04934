"""Suites of test cases over the controller's pipeline."""
