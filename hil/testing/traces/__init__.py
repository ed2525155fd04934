"""Traces: a module's calls on several backends, recorded, kept, compared (docs/traces.md)."""
