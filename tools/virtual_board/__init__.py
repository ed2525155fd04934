"""Virtual boards: a board's own root file system, address and OpenSSH server in Linux namespaces, for tests.

A **board** is a set of namespaces with a real sshd in it; a **keeper** is the process that holds them, and that does to
the board what happens to boards. :func:`start` starts one; ``scripts/virtual-board`` is the command.
"""

from tools.virtual_board.board import VirtualBoard
from tools.virtual_board.launch import start

__all__ = ["VirtualBoard", "start"]
