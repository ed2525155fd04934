"""Faults of a generation: their texts, and runs of the same prompt that differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.generations import place_tokens

from hil.compare.generation.cache import match_cache
from hil.compare.generation.faults import find_stale
from hil.compare.generation.judge import judge_generation
from hil.compare.generation.results import CacheRows, FaultKind, Generated

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
    assert judged.reason == "sampler, step 1, position 2: the board chose token 2, but token 1 has the largest logit"


def test_judge_generation_names_flipped_token():
    # A wide control bounds the logits loosely. The flip is far from a tie of the control's error.
    control = replace(EXACT, logits=LOGITS + 0.2 * np.array([1, -1, 1, -1]))
    board = replace(EXACT, logits=changed(LOGITS, 3, 2, to=3.2), tokens=np.array([0, 1, 2]))
    judged = judge_generation(board, EXACT, control)
    assert judged.fault is not None and judged.fault.kind is FaultKind.FLIP
    assert judged.reason == "flip, step 2, position 3: token 2 has the largest logit, expected token 0 (margin 1)"


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


# A state of a recurrent layer, after the last token.
STATE = CacheRows("present_conv.0", 0, False, np.array([[2.0, -1.0]]), first=3)
HYBRID = replace(EXACT, cache=(STATE, replace(CACHE, layer=1)))


def with_state(board: Generated, value: float) -> Generated:
    return replace(board, cache=(replace(STATE, rows=changed(STATE.rows, 0, 0, to=value)), *board.cache[1:]))


def test_judge_generation_accepts_right_state():
    judged = judge_generation(HYBRID, HYBRID, replace(HYBRID, logits=CONTROL.logits))
    assert judged.fault is None and judged.notes == ()


def test_judge_generation_notes_wrong_state_beside_right_logits():
    judged = judge_generation(with_state(HYBRID, 3.0), HYBRID, replace(HYBRID, logits=CONTROL.logits))
    assert judged.fault is None
    assert judged.notes == ("cache entries from position 3 on differ from the reference, without effect on the logits",)


def test_judge_generation_names_layer_of_wrong_state():
    board = with_state(replace(HYBRID, logits=changed(LOGITS, 2, 1, to=9.0)), 3.0)
    fault = judge_generation(board, HYBRID, replace(HYBRID, logits=CONTROL.logits)).fault
    assert fault is not None
    assert (fault.kind, fault.layer, fault.position, fault.tensor) == (FaultKind.LAYER, 0, 2, "present_conv.0")


def test_find_stale_returns_different_state():
    fault = find_stale(HYBRID, with_state(HYBRID, 3.0))
    assert fault is not None and (fault.position, fault.tensor) == (3, "present_conv.0")


# Two states in a layer, and a layer with a cache.
CONV, SSM = STATE, replace(STATE, name="present_ssm.0", rows=np.array([[5.0, 4.0]]))
STATES = replace(EXACT, cache=(CONV, SSM, replace(CACHE, layer=1)), prefill=LOGITS)


def with_wrong_ssm(row: int) -> Generated:
    """Return a result with a wrong state, and wrong logits at a position."""
    cache = (CONV, replace(SSM, rows=SSM.rows + 1), *STATES.cache[2:])
    return replace(STATES, logits=changed(LOGITS, row, 3, to=2.5), tokens=STATES.tokens, cache=cache)


@pytest.mark.parametrize(("row", "phase"), [(0, ""), (3, "decode only")])
def test_judge_generation_names_first_logits_of_wrong_state(row: int, phase: str):
    fault = judge_generation(with_wrong_ssm(row), STATES, replace(STATES, logits=CONTROL.logits)).fault
    assert fault is not None
    assert (fault.kind, fault.position, fault.tensor) == (FaultKind.LAYER, row, "present_ssm.0")
    assert fault.phase == phase


def test_match_cache_pairs_states_of_a_layer():
    assert match_cache(STATES.cache, STATES.cache) == STATES.cache
    assert match_cache(STATES.cache[1:], STATES.cache) == ()


@pytest.mark.parametrize("rows", [slice(0, None), slice(4, None)], ids=["all-logits", "last-logits"])
def test_judge_generation_finds_wrong_entry_without_logits_of_prompt(rows: slice):
    logits = np.tile(LOGITS, (2, 1))
    cache = replace(CACHE, name="present.0.value", is_key=False, rows=np.arange(16.0).reshape(8, 2))
    exact = Generated(place_tokens(5, 4), np.arange(8), logits, logits.argmax(-1)[4:], (cache,))
    control = replace(exact, logits=logits + 1e-6 * np.array([1, -1, 1, -1]))
    board = replace(exact, logits=logits * np.where(np.arange(8) < 2, 1, 0.9)[:, None])
    board = replace(board, cache=(replace(cache, rows=cache.rows + (np.arange(8) >= 2)[:, None]),))
    board = replace(board, positions=board.positions[rows], logits=board.logits[rows])
    fault = judge_generation(board, exact, control).fault
    assert fault is not None and (fault.kind, fault.position) == (FaultKind.SLOT, 2)
