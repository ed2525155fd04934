"""Pair outputs by name, for cases with multiple outputs, and compare errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hil.controller.web.compare.case_columns import Keys
from hil.controller.web.compare.side_cases import Floats, NumberValues, Places, SideCases, gather_values

_KEY_BITS = 32
_KEYS = (1 << _KEY_BITS) - 1


@dataclass(frozen=True, eq=False)
class OutputPairs:
    """Outputs that exist in both cases of a pair, in the order of the pairs."""

    pair: Places
    output: Keys  # the output name's word key
    before: NumberValues
    after: NumberValues


def pair_outputs(a: SideCases, b: SideCases, was: Places, now: Places, column: str) -> OutputPairs:
    """Return a statistic for outputs of paired cases. Pairs are indices into ``was`` and ``now``."""
    (old_keys, old), (new_keys, new) = (_gather_outputs(side, cases, column) for side, cases in ((a, was), (b, now)))
    right = np.minimum(np.searchsorted(new_keys, old_keys), max(new_keys.size - 1, 0))
    left = np.flatnonzero(new_keys[right] == old_keys) if new_keys.size else np.arange(0)
    common, right = old_keys[left], right[left]
    return OutputPairs(common >> _KEY_BITS, common & _KEYS, old.at(left), new.at(right))


def _gather_outputs(side: SideCases, cases: Places, column: str) -> tuple[Keys, NumberValues]:
    """Return a key per output (index into ``cases``, name), and the values over samples."""
    place = np.full(side.size, -1)
    place[cases] = np.arange(cases.size)
    case = place[side.case]
    single = case >= 0
    single[side.of_sample] = False
    case_of, name, values = (
        np.concatenate((case[single], case[side.of_sample])),
        np.concatenate((side.samples["output"][single], side.outputs["output"])),
        np.concatenate((side.samples[column][single], side.outputs[column])),
    )
    known = (case_of >= 0) & ~np.isnan(values)
    keys, which = np.unique((case_of[known] << _KEY_BITS) | name[known], return_inverse=True)
    found: Floats = values[known]
    return keys, gather_values(which, keys.size, found)
