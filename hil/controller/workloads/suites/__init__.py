"""Suites: many cases through a flow, on one or more boards, with a record per case."""
