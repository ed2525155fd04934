"""Commands for stored results."""
