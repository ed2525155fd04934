"""Ticks of emulated boards, and estimates of Arm's Vela next to them."""
