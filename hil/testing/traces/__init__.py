"""Traces: record, store and compare a module's calls on multiple backends (docs/traces.md)."""
