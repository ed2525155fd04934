"""Restore a program's inputs before every run, because some programs write to their input memory.

Inputs of at most :data:`FULL_BYTES` in total are copied before every run. For larger inputs, all bytes are compared
after the first run. After each later run, sampled blocks of :data:`FULL_BYTES` in total are compared, at positions that
advance from run to run. An input that has changed is copied before every further run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hil.agent.ipc import Arena
from hil.agent.iterations import BLOCK_BYTES, FULL_BYTES, iter_sampled_blocks

_Span = tuple[int, int]


class FreshInputs:
    """Inputs in a private mapping of the arena. The program's writes never reach the arena.

    Args:
        arena: arena with the original inputs.
        entries: inputs in message form.
        size: size of all inputs in bytes.
    """

    def __init__(self, arena: Arena, entries: Sequence[dict[str, Any]], size: int) -> None:
        self._fd = arena.fd
        self._size = size
        self._unchanged: list[_Span] = [(entry["at"], entry["at"] + entry["bytes"]) for entry in entries]
        self._changed: list[_Span] = []
        self._number = 0
        self._piece = bytearray(BLOCK_BYTES)
        self.view = arena.map_private_view(size)

    def restore(self) -> None:
        """Undo the program's changes. Call this between two runs."""
        if self._size <= FULL_BYTES:
            self._copy(0, self._size)
            return
        if found := self._find_changed():
            self._unchanged = [span for span in self._unchanged if span not in found]
            self._changed += found
        self._number += 1
        for span in self._changed:
            self._copy(*span)

    def _find_changed(self) -> set[_Span]:
        """Return the inputs that the last run changed for the first time."""
        sizes = [end - begin for begin, end in self._unchanged]
        if self._number == 0 or sum(sizes) <= FULL_BYTES:
            return {span for span in self._unchanged if not self._is_equal(*span)}
        found = set()
        for place, begin, end in iter_sampled_blocks(sizes, sum(sizes), self._number):
            base = self._unchanged[place][0]
            if not self._is_equal(base + begin, base + end):
                found.add(self._unchanged[place])
        return found

    def _copy(self, begin: int, end: int) -> None:
        while begin < end:
            begin += os.preadv(self._fd, [self.view[begin:end]], begin)

    def _is_equal(self, begin: int, end: int) -> bool:
        piece = self._piece
        while begin < end:
            size = min(os.preadv(self._fd, [piece], begin), end - begin)
            # Slice only incomplete blocks: a slice copies the bytes, which takes longer than the comparison.
            if (piece if size == BLOCK_BYTES else piece[:size]) != self.view[begin : begin + size]:
                return False
            begin += size
        return True
