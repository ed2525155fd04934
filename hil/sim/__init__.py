"""Simulator: the real agent server with simulated devices and configurable faults."""
