"""Traces: record, store and compare a module's calls on several backends (docs/traces.md)."""
