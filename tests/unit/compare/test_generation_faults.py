"""Faults of a generation: their texts, and runs of the same prompt that differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.generations import place_tokens

from hil.compare.generation import CacheRows, FaultKind, Generated, find_stale, judge_generation

# A prompt of 2 tokens and 2 steps, with 4 tokens in the vocabulary.
LOGITS = np.array([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0], [0.0, 3.0, 2.0, 1.0], [3.0, 0.0, 2.0, 1.0]])
CACHE = CacheRows("present.0.key", 0, True, np.arange(8.0).reshape(4, 2))
EXACT = Generated(place_tokens(2, 3), np.arange(4), LOGITS, LOGITS.argmax(-1)[1:], (CACHE,))
CONTROL = replace(EXACT, logits=LOGITS + 1e-6 * np.array([1, -1, 1, -1]))


def changed(array: np.ndarray, *place: int, to: float) -> np.ndarray:
    copy = array.copy()
    copy[place] = to
    return copy


def test_judge_generation_names_chosen_token():
    board = replace(EXACT, tokens=np.array([0, 2, 0]))
    judged = judge_generation(board, EXACT, CONTROL)
    assert judged.fault is not None and judged.fault.kind is FaultKind.SAMPLER
    assert judged.reason == "sampler, step 1, position 2: token 2 was chosen, the largest logit is that of token 1"


def test_judge_generation_names_flipped_token():
    # A wide control bounds the logits loosely. The flip is far from a tie of the control's error.
    control = replace(EXACT, logits=LOGITS + 0.2 * np.array([1, -1, 1, -1]))
    board = replace(EXACT, logits=changed(LOGITS, 3, 2, to=3.2), tokens=np.array([0, 1, 2]))
    judged = judge_generation(board, EXACT, control)
    assert judged.fault is not None and judged.fault.kind is FaultKind.FLIP
    assert judged.reason == "flip, step 2, position 3: the largest logit is that of token 2, not 0, with a margin of 1"


def test_find_stale_returns_first_different_logits():
    again = replace(EXACT, logits=changed(LOGITS, 2, 1, to=2.9))
    fault = find_stale(EXACT, again)
    assert fault is not None
    assert (fault.kind, fault.position, fault.step, fault.tensor) == (FaultKind.STALE, 2, 1, "logits")


def test_find_stale_returns_first_different_cache_entry():
    again = replace(EXACT, cache=(replace(CACHE, rows=changed(CACHE.rows, 3, 0, to=-1)),))
    fault = find_stale(EXACT, again)
    assert fault is not None and (fault.position, fault.tensor) == (3, "present.0.key")


def test_find_stale_accepts_equal_runs_with_nan():
    board = replace(EXACT, logits=changed(LOGITS, 1, 1, to=np.nan))
    assert find_stale(board, replace(board, logits=board.logits.copy())) is None
