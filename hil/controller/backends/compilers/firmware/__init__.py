"""Compile models to firmware for microcontrollers: IREE's static library, a schedule, and hil's C files."""
