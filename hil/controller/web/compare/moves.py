"""Classify how cases' outcomes changed between two sides, with the rules of `hil suite diff`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hil.controller.storage.outcomes import ABSENT, NOT_RUN
from hil.controller.web.compare.case_columns import Keys, WordLookup
from hil.controller.web.compare.side_cases import Places, SideCases
from hil.controller.workloads.suites.reports.changes import move_of

# Change kinds, in page order.
MOVES = ("broke", "fixed", "still_failing", "new", "gone", "other")
# Cases with the same outcomes on both sides.
UNCHANGED = "unchanged"
_KINDS = (UNCHANGED, *MOVES)
# Outcome keys for a case that is missing on a side.
_ABSENT, _NOT_RUN = -1, -2
_KEY_BITS = 32
LACKING = {_ABSENT: ABSENT, _NOT_RUN: NOT_RUN}


@dataclass(frozen=True, eq=False)
class Pairs:
    """Cases on both sides: first the later side's cases in order, then the rest."""

    names: Keys
    # before, after: index on that side, or -1
    before: Places
    after: Places
    # was, became: decisive outcome
    was: Keys
    became: Keys
    kind: npt.NDArray[np.int8]  # index in _KINDS; 0 if unchanged

    @property
    def both(self) -> Places:
        """Cases that both sides have."""
        return np.flatnonzero((self.before >= 0) & (self.after >= 0))

    def select_kind(self, move: str) -> Places:
        """Return the cases with a kind from :data:`MOVES`, or the :data:`UNCHANGED` cases."""
        return np.flatnonzero(self.kind == _KINDS.index(move))

    def move(self, pair: int) -> str:
        """Return a case's kind from :data:`MOVES`, or "" if unchanged."""
        return _KINDS[self.kind[pair]] if self.kind[pair] else ""

    def count_kinds(self) -> dict[str, int]:
        """Return case counts by kind, including the unchanged cases."""
        counted = np.bincount(self.kind, minlength=len(_KINDS))
        return {move: int(count) for move, count in zip(_KINDS, counted, strict=True)}


def pair_cases(a: SideCases, b: SideCases, words: WordLookup) -> Pairs:
    """Pair the cases of a baseline ``a`` with side ``b``."""
    names = np.concatenate([b.names, a.names[~np.isin(a.names, b.names)]])
    before, after = (_find_places(side.names, names) for side in (a, b))
    was, became = (_select_decisive_outcomes(side, places, names) for side, places in ((a, before), (b, after)))
    kind = _classify_moves(was, became, words)
    kind[before < 0], kind[after < 0] = _KINDS.index("new"), _KINDS.index("gone")
    pairs = Pairs(names, before, after, was, became, kind)
    quiet = pairs.both[kind[pairs.both] == 0]
    kind[quiet[_mask_differing(a, b, before[quiet], after[quiet])]] = _KINDS.index("other")
    return pairs


def _find_places(known: Keys, names: Keys) -> Places:
    """Return the index of every name in ``known``, or -1 for an unknown name."""
    if not known.size:
        return np.full(names.size, -1)
    order = np.argsort(known)
    found = order[np.minimum(np.searchsorted(known, names, sorter=order), known.size - 1)]
    return np.where(known[found] == names, found, -1)


def _select_decisive_outcomes(side: SideCases, places: Places, names: Keys) -> Keys:
    """Return the decisive outcomes."""
    lacking = np.where(np.isin(names, side.not_run), _NOT_RUN, _ABSENT)
    if not side.size:
        return lacking
    return np.where(places < 0, lacking, side.ended[side.deciding[places]])


def _classify_moves(was: Keys, became: Keys, words: WordLookup) -> npt.NDArray[np.int8]:
    """Return the kind of change for every pair of outcomes. Each distinct pair is classified once."""
    _, first, which = np.unique((was << _KEY_BITS) + became, return_index=True, return_inverse=True)
    texts = zip(words.get_texts(was[first]), words.get_texts(became[first]), strict=True)
    kinds = np.array([_KINDS.index(move_of(*pair) or UNCHANGED) for pair in texts], np.int8)
    return kinds[which]


def _mask_differing(a: SideCases, b: SideCases, before: Places, after: Places) -> npt.NDArray[np.bool_]:
    """Return a mask for cases with different outcome sets on the two sides."""
    if all(side.size == side.case.size for side in (a, b)):  # a single sample per case
        alone: npt.NDArray[np.bool_] = a.ended[a.latest[before]] != b.ended[b.latest[after]]
        return alone
    old, new = (_find_outcome_pairs(side, places) for side, places in ((a, before), (b, after)))
    common = np.intersect1d(old, new, assume_unique=True)
    counts = [np.bincount(ways >> _KEY_BITS, minlength=before.size) for ways in (old, new, common)]
    differ: npt.NDArray[np.bool_] = (counts[0] != counts[2]) | (counts[1] != counts[2])
    return differ


def _find_outcome_pairs(side: SideCases, cases: Places) -> Keys:
    """Return the unique (case, outcome) pairs. Cases are indices into ``cases``."""
    place = np.full(side.size, -1)
    place[cases] = np.arange(cases.size)
    chosen = place[side.case] >= 0
    return np.unique((place[side.case][chosen] << _KEY_BITS) | side.ended[chosen])
