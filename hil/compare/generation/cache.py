"""Compare the cache entries of a board with those of a reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hil.compare.generation.logits import ERROR_FLOOR, FACTOR, find_largest
from hil.compare.generation.results import CacheErrors, CacheRows, Generated
from hil.core.tensors import Array

# Maximum number of positions for detecting permuted cache entries.
_MAX_ORDERED = 1024
# Two scaled cache entries count as equal up to this difference.
_SAME_ENTRY = 0.05


def match_cache(cache: Sequence[CacheRows], reference: Sequence[CacheRows]) -> tuple[CacheRows, ...]:
    """Reorder cache tensors to match a reference from a different export. Return () if the entries are not comparable.

    The check compares the entries of layer 0 at the first position. They depend only on the token, so they must be
    about equal.
    """
    own = _number_tensors(cache)
    found = tuple(own[place] for place in _number_tensors(reference) if place in own)
    if not len(found) == len(cache) == len(reference):
        return ()
    for one, other in zip(found, reference, strict=True):
        if one.rows.shape[1:] != other.rows.shape[1:]:
            return ()
        actual, expected = (np.asarray(tensor.rows[:1], np.float64) for tensor in (one, other))
        is_far = (np.abs(actual - expected) > _SAME_ENTRY * np.abs(expected).max(initial=0.0)).any()
        if is_far and not one.layer and not one.first:
            return ()
    return found


def compare_cache(
    board: Sequence[CacheRows],
    reference: Sequence[CacheRows],
    baseline: Sequence[CacheRows],
    control: Sequence[CacheRows],
) -> tuple[CacheErrors, ...]:
    """Compare the entries of each cache tensor that has the same shape on the board and in the reference."""
    found = []
    for one, *others in zip(board, reference, baseline, control, strict=False):
        if one.rows.shape[1:] != others[0].rows.shape[1:]:
            continue
        count = min(len(tensor.rows) for tensor in (one, *others))
        actual, expected, exact, rounded = (np.asarray(tensor.rows[:count], np.float64) for tensor in (one, *others))
        error = np.abs(rounded - exact).max(-1, initial=0.0)
        scale = float(np.abs(expected).max(initial=0.0))
        limit = FACTOR * max(find_largest(error), ERROR_FLOOR * scale)
        far = np.abs(actual - expected).max(-1, initial=0.0)
        errors = np.where(far == limit, np.sign(far), far / limit)  # both may be 0 or infinite
        found.append(CacheErrors(one.name, one.layer, one.is_key, errors, one.first))
    return tuple(found)


@dataclass(frozen=True)
class BadTensor:
    """Cache tensor with entries that deviate more than ten times the control.

    Attributes:
        rows: Wrong positions, in order. A state has only the last position.
    """

    name: str
    layer: int
    is_key: bool
    is_state: bool
    rows: tuple[int, ...]


def find_bad_tensors(cache: Iterable[CacheErrors]) -> list[BadTensor]:
    """Find the tensors with wrong entries, ordered by layer; values are before keys."""
    found = [
        BadTensor(one.name, one.layer, one.is_key, one.first > 0, tuple(map(int, one.first + wrong)))
        for one in cache
        if (wrong := np.flatnonzero(~(one.errors <= 1))).size
    ]
    return sorted(found, key=lambda one: (one.layer, one.is_key))


def describe_cache(board: Generated, reference: Generated, bad: Sequence[BadTensor]) -> str:
    """Describe wrong cache entries of a run with right logits: the order differs, or no step used the entries."""
    first = min(one.rows[0] for one in bad)
    if _is_permuted(_join(board.cache), _join(reference.cache)):
        return f"cache entries from position {first} on have a different order than in the reference"
    return f"cache entries from position {first} on differ from the reference, without effect on the logits"


def _number_tensors(cache: Iterable[CacheRows]) -> dict[tuple[int, bool, int], CacheRows]:
    """Return the tensors by (layer, is a key, number).

    The number counts tensors of the same kind: a layer may have two states.
    """
    found: dict[tuple[int, bool, int], CacheRows] = {}
    numbers: Counter[tuple[int, bool]] = Counter()
    for one in cache:
        place = (one.layer, one.is_key)
        found[(*place, numbers[place])] = one
        numbers[place] += 1
    return found


def _join(cache: Sequence[CacheRows]) -> Array:
    """Concatenate all entries of each position, after scaling each tensor to a maximum of 1."""
    cache = [one for one in cache if not one.first]
    if not cache:
        return np.empty((0, 0))
    count = min(len(one.rows) for one in cache)
    rows = [np.asarray(one.rows[:count], np.float64) for one in cache]
    return np.concatenate([one / max(float(np.abs(one).max(initial=0.0)), 1e-30) for one in rows], -1)


def _is_permuted(actual: Array, expected: Array) -> bool:
    if actual.shape != expected.shape or not 0 < len(actual) <= _MAX_ORDERED:
        return False
    near = np.array([np.abs(expected - row).max(-1).argmin() for row in actual])
    is_whole = len(set(near.tolist())) == len(actual) and (near != np.arange(len(near))).any()
    return bool(is_whole and np.abs(actual - expected[near]).max(initial=0.0) <= _SAME_ENTRY)
