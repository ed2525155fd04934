"""Clients of a farm: requests, leases and results."""
