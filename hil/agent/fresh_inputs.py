"""Give a program the same inputs before every run of a call: some programs write to the memory of their inputs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hil.agent.ipc import Arena

_PIECE = 1 << 16


class FreshInputs:
    """Inputs in a private mapping of the arena: what the program writes there never reaches the arena itself.

    After the first run the mapping is compared with the arena. Inputs that the program has changed are copied from the
    arena before every further run; a program that changes none costs one comparison and no memory.

    Args:
        entries: the inputs, as messages describe them.
    """

    def __init__(self, arena: Arena, entries: Sequence[dict[str, Any]], size: int) -> None:
        self._fd = arena.fd
        self._spans = [(entry["at"], entry["at"] + entry["bytes"]) for entry in entries]
        self._changed: list[tuple[int, int]] | None = None
        self.view = arena.private_view(size)

    def restore(self) -> None:
        """Put back what the program has changed; called between two runs."""
        if self._changed is None:
            self._changed = [span for span in self._spans if not self._is_unchanged(*span)]
        for begin, end in self._changed:
            while begin < end:
                begin += os.preadv(self._fd, [self.view[begin:end]], begin)

    def _is_unchanged(self, begin: int, end: int) -> bool:
        piece = bytearray(_PIECE)
        while begin < end:
            size = min(os.preadv(self._fd, [piece], begin), end - begin)
            if piece[:size] != self.view[begin : begin + size]:
                return False
            begin += size
        return True
