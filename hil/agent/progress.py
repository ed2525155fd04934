"""Progress of a running generation: the position and step of the current call, at the start of the output arena.

The worker writes both numbers before each call of the decoder. The agent reads them after a crash or a timeout.
"""

from __future__ import annotations

import contextlib
import struct

from hil.agent.ipc import ALIGN, Arena
from hil.core.steps import MAX_STEPS
from hil.errors import HilError

# Arena bytes before the outputs of a generation.
SIZE = ALIGN
# Position of the call's first token, and step number. Position -1: no call has started.
_PLACE = struct.Struct("<qq")
_MAX_POSITION = 1 << 31


class ProgressLog:
    """Writer of the progress, for the worker."""

    def __init__(self, arena: Arena) -> None:
        self._view = arena.view(SIZE, grow=True)
        self.note(-1, 0)

    def note(self, position: int, step: int) -> None:
        """Write the position and step of the next call."""
        _PLACE.pack_into(self._view, 0, position, step)


def describe_progress(arena: Arena) -> str:
    """Describe the progress that the worker wrote last. Return "" if it is invalid: the worker may be hostile."""
    with contextlib.suppress(HilError):
        position, step = _PLACE.unpack_from(arena.view(SIZE, grow=False))
        if 0 <= position < _MAX_POSITION and 0 <= step <= MAX_STEPS:
            where = f"at step {step}" if step else "in the prompt"
            return f"the generation was {where}, position {position}"
    return ""
