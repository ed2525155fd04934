"""Boards without an agent: the runtime's command runs programs over SSH."""
