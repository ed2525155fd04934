"""Microcontrollers: firmware, its compiler, and the agent that bridges the protocol to a serial line."""
