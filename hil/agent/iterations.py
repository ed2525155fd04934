"""Compare the outputs of an invocation's runs with each other, outside the timed section.

Outputs of at most :data:`FULL_BYTES` are compared byte by byte after every run. For larger outputs, each run compares
:data:`FULL_BYTES` in evenly spread blocks that advance from run to run. The last run compares all bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hil.agent.ipc import Arena, lay_out
from hil.core.digest import Hasher
from hil.core.tensors import Array, to_bytes

FULL_BYTES = 1 << 20
BLOCK_BYTES = 1 << 16
# Distinct results to store for the controller: maximum number, and maximum total size in bytes without the first.
MAX_KEPT = 4
MAX_KEPT_BYTES = 64 << 20
# Maximum number of distinct results to distinguish. Runs with further results are only counted.
MAX_ANSWERS = 1000


@dataclass
class _Answer:
    """Distinct result: first run, and number of runs with this result."""

    first: int
    runs: int = 1
    entries: list[dict[str, Any]] | None = None  # outputs in the arena; None if not stored


@dataclass
class _Kept:
    """Stored outputs of a distinct result, for comparison."""

    answer: _Answer
    kinds: list[Any]  # dtypes and shapes of the outputs
    parts: list[Any]  # bytes of the outputs


class AnswerLog:
    """Distinct results of an invocation's runs. The outputs of the first run are at the start of the arena.

    Args:
        arena: output arena.
        names: output names.
        runs: expected number of runs.
        reserved: number of bytes at the start of the arena to leave unchanged.
    """

    def __init__(self, arena: Arena, names: Sequence[str], runs: int, reserved: int = 0) -> None:
        self._arena = arena
        self._names = names
        self._runs = runs
        self._number = 0
        self._kept: list[_Kept] = []
        self._answers: list[_Answer] = []
        self._by_digest: dict[str, _Answer] = {}
        self._differing: set[int] = set()
        self.size = reserved  # arena bytes in use
        self.is_sampled = False
        self.others = 0  # runs with further results that were only counted

    @property
    def runs(self) -> int:
        """Number of runs so far."""
        return self._number

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Outputs of the first run in message form."""
        return self._answers[0].entries or [] if self._answers else []

    def record(self) -> dict[str, Any]:
        """Return the summary of all runs in message form: distinct results, with outputs if stored."""
        return {
            "answers": [[one.runs, one.first, one.entries] for one in self._answers],
            "sampled": self.is_sampled,
            "others": self.others,
            "differing": sorted(self._differing),
        }

    def add(self, arrays: Sequence[Array]) -> None:
        """Compare a run's outputs with earlier runs."""
        number, self._number = self._number, self._number + 1
        if not number:
            self._keep(_Answer(number), arrays)
            return
        kinds, parts = _list_kinds(arrays), [to_bytes(array) for array in arrays]
        for place, kept in enumerate(self._kept):
            if kept.kinds == kinds and self._is_same(kept.parts, parts, number):
                kept.answer.runs += 1
                if place:  # the next run usually repeats this result
                    self._kept.insert(0, self._kept.pop(place))
                return
        self._add_other(number, arrays, kinds, parts)

    def _add_other(self, number: int, arrays: Sequence[Array], kinds: list[Any], parts: list[Any]) -> None:
        first = next(kept for kept in self._kept if not kept.answer.first)
        pairs = zip(first.kinds, kinds, first.parts, parts, strict=True)
        self._differing |= {
            place
            for place, (own, kind, kept, data) in enumerate(pairs)
            if own != kind or not _has_equal_bytes(kept, data)
        }
        size = sum(part.nbytes for part in parts)
        if len(self._kept) < MAX_KEPT and self.size + size <= count_arena_bytes(self.outputs) + MAX_KEPT_BYTES:
            self._keep(_Answer(number), arrays)
            return
        hasher = Hasher()
        hasher.update(repr(kinds).encode())
        for part in parts:
            hasher.update(part)
        if (known := self._by_digest.get(digest := hasher.digest())) is not None:
            known.runs += 1
        elif len(self._answers) < MAX_ANSWERS:
            self._by_digest[digest] = answer = _Answer(number)
            self._answers.append(answer)
        else:
            self.others += 1

    def _keep(self, answer: _Answer, arrays: Sequence[Array]) -> None:
        answer.entries, self.size = lay_out(self._arena, zip(self._names, arrays, strict=True), self.size)
        self._answers.append(answer)
        if self._runs == 1:
            return
        view = self._arena.view(self.size, grow=True)
        parts: list[Any] = [view[entry["at"] : entry["at"] + entry["bytes"]] for entry in answer.entries]
        if sum(part.nbytes for part in parts) <= FULL_BYTES:
            # Comparing with a bytearray is fast; memoryviews compare element by element.
            parts = [bytearray(part) for part in parts]
        else:
            self.is_sampled = True
        self._kept.insert(0, _Kept(answer, _list_kinds(arrays), parts))

    def _is_same(self, kept: list[Any], parts: list[Any], number: int) -> bool:
        if isinstance(kept[0] if kept else None, memoryview) and number < self._runs - 1:
            total = sum(part.nbytes for part in kept)
            return all(
                bytearray(kept[place][begin:end]) == parts[place][begin:end]
                for place, begin, end in iter_sampled_blocks([part.nbytes for part in kept], total, number)
            )
        return all(map(_has_equal_bytes, kept, parts))


def count_arena_bytes(entries: Sequence[dict[str, Any]]) -> int:
    """Return the number of arena bytes that the entries take."""
    return max((entry["at"] + entry["bytes"] for entry in entries), default=0)


def _list_kinds(arrays: Sequence[Array]) -> list[Any]:
    return [(array.dtype, array.shape) for array in arrays]


def _has_equal_bytes(kept: Any, data: memoryview) -> bool:
    """Return True if two outputs have the same bytes. ``kept`` is a bytearray or a view of the arena."""
    if isinstance(kept, bytearray):
        return kept == data
    blocks = range(0, kept.nbytes, BLOCK_BYTES)
    same = (bytearray(kept[at : at + BLOCK_BYTES]) == data[at : at + BLOCK_BYTES] for at in blocks)
    return kept.nbytes == data.nbytes and all(same)


def iter_sampled_blocks(sizes: Sequence[int], total: int, number: int) -> Iterator[tuple[int, int, int]]:
    """Yield (tensor, begin, end) for every block that a run compares.

    Blocks are spread evenly. Each run compares the next blocks, so that later runs compare every block.
    """
    count = -(-total // BLOCK_BYTES)
    wanted = FULL_BYTES // BLOCK_BYTES
    for step in range(wanted):
        begin = (step * count // wanted + number) % count * BLOCK_BYTES
        end, base = min(begin + BLOCK_BYTES, total), 0
        for place, size in enumerate(sizes):
            low, high = max(begin - base, 0), min(end - base, size)
            if low < high:
                yield place, low, high
            base += size
