"""Triage of failures: who owns a failing case, and whether it is known."""
