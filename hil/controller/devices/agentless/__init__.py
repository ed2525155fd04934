"""Boards without an agent: programs are run by the runtime's own command, through SSH."""
