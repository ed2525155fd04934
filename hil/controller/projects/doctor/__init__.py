"""Checks of `hil doctor`: what hil requires on this machine, and which optional parts are missing."""
