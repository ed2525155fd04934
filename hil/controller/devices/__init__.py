"""Boards: found, connected to, given an agent, used and looked after."""
