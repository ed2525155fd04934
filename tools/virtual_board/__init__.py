"""Virtual boards for tests: each has a root file system, an address and an OpenSSH server in separate namespaces.

A **board** is a set of namespaces with a real sshd. A **keeper** is the process that owns the namespaces and simulates
events such as power cuts. :func:`start` starts a board; ``scripts/virtual-board`` is the command.
"""

from tools.virtual_board.board import VirtualBoard
from tools.virtual_board.launch import start

__all__ = ["VirtualBoard", "start"]
