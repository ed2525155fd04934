"""Verdicts on generations of the example decoder: faults and their causes, bounds, near-ties, and invalid numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from support.decoder import NumpyDecoder
from support.generations import place_tokens

from hil.compare.generation.cache import match_cache
from hil.compare.generation.judge import judge_generation
from hil.compare.generation.results import CacheRows, FaultKind, Generated, GenerationFault, GenerationVerdict
from hil.core.results import Outcome
from hil.core.steps import TURN_END, TokenPlaces
from hil.core.tensors import Array

WEIGHTS = Path(__file__).parents[3] / "examples" / "decoder" / "weights.npz"
PROMPT = 16
TEXT = b"The board needs SSH, a POSIX shell (busybox is\nsufficient), and an x86-64 or 64-"
TOKENS = list(TEXT[: PROMPT + 64])
PLACES = place_tokens(PROMPT, 65)


@cache
def weights() -> dict[str, Array]:
    with np.load(WEIGHTS) as file:
        return {name: file[name].astype(np.float64) for name in file.files}


class RoundedDecoder(NumpyDecoder):
    """The decoder with weights, cache entries, and results of blocks in an arithmetic."""

    def __init__(self, dtype: Any, fault: str | None = None) -> None:
        self._dtype = dtype
        super().__init__({name: self._round(value) for name, value in weights().items()}, fault)

    def _round(self, values: Array) -> Array:
        return values.astype(self._dtype).astype(np.float64)

    @np.errstate(all="ignore")
    def run(self, ids: Any) -> Array:
        return self._round(super().run(ids))

    def _extend(self, past: Array, new: Array, positions: Array) -> Array:
        return super()._extend(past, self._round(new), positions)

    def _attend(self, n: int, x: Array, positions: Array) -> Array:
        return self._round(super()._attend(n, self._round(x), positions))

    def _feed_forward(self, n: int, x: Array, positions: Array) -> Array:
        return self._round(super()._feed_forward(n, self._round(x), positions))


@cache
def generated(dtype: Any = np.float64, fault: str | None = None) -> Generated:
    """Run the prompt, then the forced tokens; and all tokens as a prompt."""
    decoder = RoundedDecoder(dtype, fault)
    logits = np.concatenate([decoder.run(TOKENS[:PROMPT]), *(decoder.run([token]) for token in TOKENS[PROMPT:])])
    rows = tuple(
        CacheRows(
            f"present.{layer}.{part}", layer, part == "key", entries[layer].swapaxes(0, 1).reshape(len(TOKENS), -1)
        )
        for layer in range(decoder.layers)
        for part, entries in (("key", decoder.keys), ("value", decoder.values))
    )
    whole = RoundedDecoder(dtype, fault).run(TOKENS)
    return Generated(PLACES, np.arange(len(TOKENS)), logits, np.argmax(logits[PROMPT - 1 :], -1), rows, whole)


def judge(board: Generated, arithmetic: Any = np.float16) -> GenerationVerdict:
    return judge_generation(board, generated(), generated(arithmetic))


def has_fault(judged: GenerationVerdict, kind: FaultKind, position: int, layer: int = -1, phase: str = "") -> None:
    assert judged.outcome is Outcome.FAIL and judged.fault is not None
    fault = judged.fault
    assert (fault.kind, fault.position, fault.layer, fault.phase) == (kind, position, layer, phase), judged.reason
    assert fault.step == max(position - PROMPT + 1, 0)
    assert judged.reason.startswith(str(fault))


FAULTS = [
    ("slot", FaultKind.SLOT, 40, -1, "decode only"),
    ("mask_next", FaultKind.MASK, 0, -1, "prefill only"),
    ("mask_newest", FaultKind.MASK, 1, -1, ""),
    ("rope", FaultKind.POSITION, 48, -1, ""),
    ("overflow", FaultKind.NONFINITE, 56, 2, ""),
    ("layer", FaultKind.LAYER, 50, 2, "decode only"),
    ("column", FaultKind.HEAD, 0, -1, ""),
]


@pytest.mark.parametrize("arithmetic", [np.float32, np.float16], ids=["f32", "f16"])
@pytest.mark.parametrize(("name", "kind", "position", "layer", "phase"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_judge_generation_names_cause_of_fault(
    name: str, kind: FaultKind, position: int, layer: int, phase: str, arithmetic: Any
):
    has_fault(judge(generated(arithmetic, name), arithmetic), kind, position, layer, phase)


@pytest.mark.parametrize(("name", "kind", "position", "layer", "phase"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_judge_generation_fails_faults_without_prefill(
    name: str, kind: FaultKind, position: int, layer: int, phase: str
):
    has_fault(judge(replace(generated(np.float16, name), prefill=None)), kind, position, layer)


@pytest.mark.parametrize("name", [fault[0] for fault in FAULTS])
def test_judge_generation_fails_faults_without_cache(name: str):
    judged = judge(replace(generated(np.float16, name), cache=()))
    assert judged.outcome is Outcome.FAIL and judged.fault is not None
    assert judged.fault.kind in (FaultKind.LOGITS, FaultKind.NONFINITE)


def test_judge_generation_notes_cache_in_another_order():
    judged = judge(generated(np.float32, "swap"), np.float32)
    assert judged.outcome is Outcome.PASS and judged.fault is None
    assert judged.notes == ("cache entries from position 39 on have a different order than in the reference",)


def test_judge_generation_notes_unused_cache_entries():
    board = generated(np.float32)
    last = board.cache[0]
    rows = last.rows.copy()
    rows[-1] += 1
    judged = judge(replace(board, cache=(replace(last, rows=rows), *board.cache[1:])), np.float32)
    assert judged.outcome is Outcome.PASS
    assert judged.notes == (
        "cache entries from position 79 on differ from the reference, without effect on the logits",
    )


def test_judge_generation_measures_cache_errors_relative_to_bound():
    cache = judge(generated(np.float16, "layer")).cache
    assert {one.layer for one in cache} == {0, 1, 2, 3} and len(cache) == 8
    assert all((one.errors > 1).any() == (one.layer == 3) and (one.errors[:50] <= 1).all() for one in cache)


def test_judge_generation_skips_cache_of_another_size():
    board, reference = generated(np.float32), generated()
    half = tuple(replace(one, rows=one.rows[:, ::2]) for one in reference.cache)
    judged = judge_generation(board, replace(reference, cache=half), replace(generated(np.float32), cache=half))
    assert judged.outcome is Outcome.PASS and not judged.notes


def test_match_cache_orders_tensors_as_reference():
    cache = generated(np.float32).cache
    turned = tuple(replace(one, name=f"other.{one.name}") for one in cache[::-1])
    assert match_cache(turned, generated().cache) == turned[::-1]


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, rows=one.rows[:, ::-1]),
        lambda one: replace(one, rows=one.rows[:, ::2]),
        lambda one: replace(one, layer=one.layer + 1),
        lambda one: replace(one, is_key=True),
    ],
)
def test_match_cache_drops_entries_of_another_form(change: Any):
    cache = generated().cache
    assert match_cache(tuple(map(change, cache)), cache) == match_cache(cache[1:], cache) == ()


@np.errstate(invalid="ignore")
def test_match_cache_keeps_numbers_that_are_not_finite():
    cache = generated().cache
    broken = tuple(replace(one, rows=one.rows * np.nan) for one in cache)
    assert match_cache(broken, cache) == broken


@pytest.mark.parametrize("kept", [1, 5])
def test_judge_generation_fails_stale_cache(kept: int):
    """The board still has entries of another prompt, and attends to them."""
    decoder = RoundedDecoder(np.float16)
    decoder.run([*b"Next: "][:kept])
    logits = np.concatenate([decoder.run(TOKENS[:PROMPT]), *(decoder.run([token]) for token in TOKENS[PROMPT:])])
    board = generated(np.float16)
    rows = tuple(
        replace(one, rows=entries[one.layer].swapaxes(0, 1).reshape(len(TOKENS) + kept, -1)[: len(TOKENS)])
        for one, entries in zip(board.cache, [decoder.keys, decoder.values] * 4, strict=True)
    )
    board = replace(board, logits=logits, tokens=np.argmax(logits[PROMPT - 1 :], -1), cache=rows, prefill=None)
    assert judge(board).outcome is Outcome.FAIL


@pytest.mark.parametrize("arithmetic", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
def test_judge_generation_passes_board_in_its_arithmetic(arithmetic: Any):
    """The board rounds as often as the control, at other places."""

    class Other(RoundedDecoder):
        def _extend(self, past: Array, new: Array, positions: Array) -> Array:
            return NumpyDecoder._extend(self, past, new, positions)

        def run(self, ids: Any) -> Array:
            return NumpyDecoder.run(self, ids)

    decoder = Other(arithmetic)
    logits = np.concatenate([decoder.run(TOKENS[:PROMPT]), *(decoder.run([token]) for token in TOKENS[PROMPT:])])
    board = replace(generated(arithmetic), logits=logits, tokens=np.argmax(logits[PROMPT - 1 :], -1))
    judged = judge(board, arithmetic)
    assert judged.outcome is Outcome.PASS, judged.reason
    assert judged.fault is None and judged.kl_bound > 0 and judged.error_bound > 0
    assert all(row.kl <= judged.kl_bound and row.max_abs <= judged.error_bound for row in judged.rows)


@pytest.mark.parametrize("arithmetic", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
def test_judge_generation_rejects_narrow_arithmetic_on_float32_board(arithmetic: Any):
    assert judge(generated(arithmetic), np.float32).outcome is Outcome.FAIL


def test_judge_generation_passes_equal_logits():
    judged = judge_generation(generated(), generated(), generated())
    assert judged.outcome is Outcome.PASS and not judged.notes
    assert judged.top == {1: 1.0, 5: 1.0, 100: 1.0} and judged.first_divergent is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 15, 40, 79])
def test_judge_generation_reports_first_nonfinite_logits(bad: float, position: int):
    board = generated()
    logits = board.logits.copy()
    logits[position:, 3] = bad
    judged = judge(replace(board, logits=logits))
    has_fault(judged, FaultKind.NONFINITE, position)
    assert judged.fault is not None and judged.fault.tensor == "logits"


def mask_token(made: Generated, value: float) -> Generated:
    assert made.prefill is not None
    logits, prefill = made.logits.copy(), made.prefill.copy()
    logits[:, 3] = prefill[:, 3] = value
    return replace(made, logits=logits, prefill=prefill)


@pytest.mark.parametrize(("mask", "boards"), [(-math.inf, -math.inf), (-3.4e38, -3.4e38), (-1e9, -math.inf)])
def test_judge_generation_passes_tokens_that_the_model_masks(mask: float, boards: float):
    board, reference = mask_token(generated(np.float32), boards), mask_token(generated(), mask)
    judged = judge_generation(board, reference, mask_token(generated(np.float32), mask))
    assert judged.outcome is Outcome.PASS and judged.error_bound < 0.1
    wrong = replace(board, logits=np.where(board.logits < -1e8, 0.0, board.logits))
    assert judge_generation(wrong, reference, board).outcome is Outcome.FAIL


def test_judge_generation_describes_prefill_if_only_prefill_is_wrong():
    board = generated()
    assert board.prefill is not None
    prefill = board.prefill.copy()
    prefill[7] += np.arange(prefill.shape[1])
    judged = judge(replace(board, prefill=prefill))
    assert judged.outcome is Outcome.FAIL and "at position 7 KL" in judged.reason and "KL 0 " not in judged.reason


def test_judge_generation_blames_layer_before_nonfinite_cache():
    board = generated()
    cache = list(board.cache)
    rows = cache[4].rows.copy()
    rows[30:] = np.nan
    cache[4] = replace(cache[4], rows=rows)
    has_fault(judge(replace(board, cache=tuple(cache))), FaultKind.NONFINITE, 30, layer=1)


def test_judge_generation_reports_wrong_token_of_right_logits():
    board = generated()
    tokens = board.tokens.copy()
    tokens[30] = (tokens[30] + 1) % 128
    has_fault(judge(replace(board, tokens=tokens)), FaultKind.SAMPLER, PROMPT - 1 + 30)


def test_judge_generation_blames_model_whose_steps_differ_from_prompt():
    board = generated(np.float32)
    logits = generated().logits.copy()
    logits[30:] += 1
    other = replace(generated(), logits=logits)
    judged = judge_generation(replace(board, prefill=None), generated(), generated(np.float32), other)
    assert judged.outcome is Outcome.FAIL and judged.fault is not None
    assert (judged.fault.kind, judged.fault.position) == (FaultKind.MODEL, 30)


# ---- near-ties


def rows(*logits: list[float]) -> Generated:
    array = np.array(logits)
    return Generated(place_tokens(1, len(array)), np.arange(len(array)), array, np.argmax(array, -1))


@pytest.mark.parametrize(
    ("margin", "outcome"),
    [(0.019, Outcome.PASS), (0.021, Outcome.FAIL), (0.05, Outcome.FAIL)],
)
def test_judge_generation_accepts_flip_only_at_near_tie(margin: float, outcome: Outcome):
    reference = rows([3.0, 1.0, 0.0], [2.0, 2.0 - margin, 0.0], [0.0, 1.0, 5.0])
    control = replace(reference, logits=reference.logits + np.array([0.01, -0.01, 0]))
    logits = reference.logits + np.array([[0, 0, 0], [-0.03, 0.03, 0], [0, 0, 0]])
    judged = judge_generation(replace(reference, logits=logits, tokens=np.argmax(logits, -1)), reference, control)
    assert judged.outcome is outcome, judged.reason
    assert judged.first_divergent == 1
    if outcome is Outcome.PASS:
        assert judged.notes == ("the largest logit differs at 1 of 3 positions, each time in a near-tie",)
    else:
        assert judged.fault is not None
        assert (judged.fault.kind, judged.fault.position) == (FaultKind.FLIP, 1)


# ---- several turns, and the perplexity of known tokens


def test_judge_generation_names_step_of_later_turn():
    places = TokenPlaces.from_turns([1, 1, TURN_END, 1], [0, 0, TURN_END, 0, 0])
    logits = np.eye(5) * 8.0
    exact = Generated(places, np.arange(5), logits, np.argmax(logits[[1, 2, 3, 4]], -1))
    wrong = replace(exact, logits=logits + np.array([0, 0, 0, 0, 1.0])[:, None] * np.eye(5)[0])
    fault = judge_generation(wrong, exact, replace(exact, logits=logits + 1e-6)).fault
    assert fault is not None and (fault.position, fault.step) == (4, 2)


def test_judge_generation_measures_perplexity_of_known_tokens():
    exact = rows([0.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.0, 9.0, 0.0])
    board = replace(exact, text=np.array([2, 0, -1]))
    found = judge_generation(board, exact, exact).perplexity
    # The row of position 0 predicts token 0. The board chose the token at position 2, which is no text.
    assert found is not None and (found.tokens, found.board_nats) == (1, pytest.approx(math.log(3)))
    found = judge_generation(replace(board, text=np.array([2, 0, 0])), exact, exact).perplexity
    assert found is not None and found.tokens == 2
    assert found.board_nats == pytest.approx((math.log(3) + math.log(1 + 2 * math.exp(-3))) / 2)
    assert found.reference_nats == found.board_nats and found.error_nats == 0


def test_judge_generation_has_no_perplexity_without_text():
    exact = rows([0.0, 1.0], [1.0, 0.0])
    assert judge_generation(exact, exact, exact).perplexity is None


# ---- arbitrary numbers

SIZE = 4
finite = st.floats(-1e4, 1e4)
numbers = st.one_of(finite, st.floats(width=64), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e308]))


def arrays(shape: tuple[int, int], elements: st.SearchStrategy[float]) -> st.SearchStrategy[Array]:
    return stn.arrays(np.float64, shape, elements=elements)


@st.composite
def generations(draw: st.DrawFn, elements: st.SearchStrategy[float], with_cache: bool) -> Generated:
    logits = draw(arrays((6, SIZE), elements))
    cache: tuple[CacheRows, ...] = ()
    if with_cache:
        cache = tuple(
            CacheRows(f"{layer}{key}", layer, key, draw(arrays((6, 2), elements)))
            for layer in range(2)
            for key in (True, False)
        )
    tokens = draw(st.just(np.argmax(logits[1:], -1)) | stn.arrays(np.int64, 5, elements=st.integers(0, SIZE - 1)))
    prefill = draw(st.none() | st.just(logits) | arrays((6, SIZE), elements))
    return Generated(place_tokens(2, 5), np.arange(6), logits, tokens, cache, prefill)


def is_masked(logits: Array) -> Array:
    return np.asarray(logits < logits.max(-1, keepdims=True) - 100)


@given(st.data(), st.booleans(), st.booleans())
@np.errstate(invalid="ignore")
def test_judge_generation_handles_any_numbers(data: st.DataObject, with_cache: bool, is_wild: bool):
    exact = data.draw(generations(numbers if is_wild else finite, with_cache))
    control = data.draw(st.just(exact) | generations(numbers, with_cache))
    board = data.draw(st.just(exact) | generations(numbers, with_cache))
    judged = judge_generation(board, exact, control)
    assert (judged.outcome is Outcome.PASS) == (judged.fault is None) == (not judged.reason)
    str(judged.fault)
    if judged.outcome is not Outcome.PASS:
        return
    assert math.isfinite(judged.kl_bound) and math.isfinite(judged.error_bound)
    # Tokens without probability in both may differ, and may be infinite.
    masked = is_masked(board.logits) & is_masked(exact.logits)
    assert (np.isfinite(board.logits) | masked).all()
    assert ((np.abs(board.logits - exact.logits) <= judged.error_bound) | masked).all()
    assert all(row.kl <= judged.kl_bound for row in judged.rows)
    assert board.tokens.tolist() == np.argmax(board.logits[1:], -1).tolist()
    if board.prefill is not None:
        masked = is_masked(board.prefill) & is_masked(exact.logits)
        assert ((np.abs(board.prefill - exact.logits) <= judged.error_bound) | masked).all()


@given(st.floats(0, 1), st.integers(0, 79), st.integers(0, 127))
def test_judge_generation_never_passes_error_above_bound(scale: float, position: int, token: int):
    board = generated(np.float16)
    bound = judge(board).error_bound
    logits = board.logits.copy()
    # More than the bound on either side of the reference.
    logits[position, token] = generated().logits[position, token] + bound * (1.001 + scale)
    judged = judge(replace(board, logits=logits, tokens=np.argmax(logits[PROMPT - 1 :], -1)))
    assert judged.outcome is Outcome.FAIL


def test_generation_fault_text_names_place():
    fault = GenerationFault(FaultKind.LAYER, 50, 35, "present.3.key", 2, "decode only")
    assert str(fault) == "layer 2, step 35, position 50, present.3.key, decode only"
    assert str(GenerationFault(FaultKind.HEAD, 3, 0)) == "head, in the prompt, position 3"


@pytest.mark.parametrize("error", [0.1, 1e3, 1e300])
def test_judge_generation_rejects_zeros_with_any_control(error: float):
    reference = generated()
    noise = np.random.default_rng(1).standard_normal(reference.logits.shape) * error
    board = replace(reference, logits=np.zeros_like(reference.logits), tokens=np.zeros_like(reference.tokens))
    judged = judge_generation(board, reference, replace(reference, logits=reference.logits + noise))
    assert judged.outcome is Outcome.FAIL
