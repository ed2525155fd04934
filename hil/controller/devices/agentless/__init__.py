"""Boards without an agent: programs are run by the runtime's own command, through SSH.

The board needs a POSIX shell, SFTP and the runtime's command; ``iree-run-module`` is put there where the config names
no other. What such a board cannot measure is absent from its results.
"""

from hil.controller.devices.agentless.board import CommandBoard
from hil.controller.devices.agentless.calls import CommandCall, CommandLoaded
from hil.controller.devices.agentless.program import CommandProgram

__all__ = ["CommandBoard", "CommandCall", "CommandLoaded", "CommandProgram"]
