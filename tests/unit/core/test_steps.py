"""Running decoders step by step: prompts, tokens, caches, input rules, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.step_programs import VOCABULARY, SummingProgram, logits_of, plan_of

from hil.core import stepped_program, steps
from hil.core.stepped_program import BoundSteps, SteppedProgram
from hil.core.steps import (
    MAX_PROMPT_FUNCTIONS,
    MAX_STEPS,
    TURN_END,
    PromptFunction,
    StepRule,
    StepsPlan,
    TokenPlaces,
    join_turns,
    make_stepped_outputs,
    split_turns,
)
from hil.core.tensors import Array, TensorSpec
from hil.errors import RunFailed, UsageError

PROMPT = [1, 4, 2, 6]
NONE: list[int] = []


def ids(values: Sequence[int]) -> Array:
    return np.array(values, np.int64)


def run(program: Any, plan: StepsPlan, prompt: Sequence[int], forced: Sequence[int] = ()) -> list[Array]:
    stepped = SteppedProgram(program, plan)
    stepped.bind([ids(prompt), ids(forced), ids(NONE)])
    stepped.run()
    return stepped.fetch()


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count + 1):
        tokens.append(int(np.argmax(logits_of(tokens)[-1])))
    return tokens[len(prompt) :]


def test_stepped_program_returns_logits_of_forced_tokens():
    program = SummingProgram()
    logits, positions, tokens, cache = run(program, plan_of(program, 9), PROMPT, [3, 3, 0])
    np.testing.assert_array_equal(logits, logits_of([*PROMPT, 3, 3, 0]))
    assert positions.tolist() == list(range(7)) and positions.dtype == np.int64
    assert tokens.tolist() == np.argmax(logits[3:], -1).tolist()
    assert cache.shape == (1, 7, 4)


def test_stepped_program_picks_largest_logit():
    program = SummingProgram()
    logits, _, tokens, _ = run(program, plan_of(program, 6), PROMPT)
    expected = greedy(PROMPT, 6)
    assert tokens.tolist() == expected
    np.testing.assert_array_equal(logits, logits_of([*PROMPT, *expected[:-1]]))


def test_stepped_program_picks_lowest_token_of_equal_logits():
    class Flat(SummingProgram):
        def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
            logits, cache = super().step(inputs)
            return [np.where(np.arange(VOCABULARY) >= 2, 5.0, 0.0) + 0 * logits, cache]

    program = Flat()
    assert run(program, plan_of(program, 2), PROMPT)[2].tolist() == [2, 2, 2]


def test_stepped_program_continues_with_next_turn():
    program = SummingProgram()
    prompt, forced = [1, 4, TURN_END, 2, 6, TURN_END, 5], [3, TURN_END, 0, 1, TURN_END]
    logits, positions, tokens, _ = run(program, plan_of(program, 9), prompt, forced)
    fed = [1, 4, 3, 2, 6, 0, 1, 5]
    np.testing.assert_array_equal(logits, logits_of(fed))
    assert positions.tolist() == list(range(len(fed)))
    picked = [int(np.argmax(row)) for row in logits_of(fed)]
    assert split_turns(tokens) == [picked[1:3], picked[4:7], picked[7:8]]
    assert TokenPlaces.from_turns(prompt, tokens) == TokenPlaces((1, 2, 4, 5, 6, 7), (2, 5, 6))


def test_stepped_program_runs_all_steps_in_each_turn():
    program = SummingProgram()
    _, positions, tokens, _ = run(program, plan_of(program, 2), [1, 4, TURN_END, 2])
    first = greedy([1, 4], 2)
    assert split_turns(tokens) == [first, greedy([1, 4, *first[:-1], 2], 2)]
    assert positions.tolist() == list(range(7))


def test_stepped_program_notes_steps_of_all_turns():
    program, noted = SummingProgram(), []
    stepped = SteppedProgram(program, plan_of(program, 1))
    stepped.note_call = lambda position, step: noted.append((position, step))
    stepped.bind([ids([1, 4, TURN_END, 2]), ids(NONE), ids(NONE)])
    stepped.run()
    assert noted == [(0, 0), (2, 1), (3, 0), (4, 2)]


@pytest.mark.parametrize("prompt", [[1, TURN_END], [TURN_END, 1], [1, TURN_END, TURN_END, 2]])
def test_stepped_program_rejects_turn_without_tokens(prompt: list[int]):
    with pytest.raises(UsageError, match="the prompt is empty"):
        run(SummingProgram(), plan_of(SummingProgram(), 1), prompt)


def test_stepped_program_rejects_forced_tokens_of_other_turns():
    with pytest.raises(UsageError, match="got forced tokens for 1 turns, but the prompt has 2 turns"):
        run(SummingProgram(), plan_of(SummingProgram(), 1), [1, TURN_END, 2], [3])


def test_stepped_program_counts_tokens_of_all_turns():
    plan = plan_of(SummingProgram(slots=6), 2)
    with pytest.raises(UsageError, match="7 tokens exceed the cache of 6 tokens"):
        run(SummingProgram(slots=6), plan, [1, 4, TURN_END, 2])


@given(st.lists(st.lists(st.integers(0, 9)), min_size=1))
def test_turns_round_trip(turns: list[list[int]]):
    assert split_turns(join_turns(turns)) == turns


@given(st.lists(st.integers(-1, 3)), st.lists(st.integers(-1, 3)))
def test_token_places_are_ascending(prompt: list[int], tokens: list[int]):
    found = TokenPlaces.from_turns(prompt, tokens)
    assert list(found.steps) == sorted(set(found.steps))
    assert all(found.step_of(position) == number for number, position in enumerate(found.steps, 1))


def test_stepped_program_ends_at_stop_token():
    program = SummingProgram()
    expected = greedy(PROMPT, 6)
    stop = expected[2]
    found = run(program, plan_of(program, 6, stop=(stop,)), PROMPT)[2].tolist()
    assert found == expected[: expected.index(stop) + 1]


def test_stepped_program_feeds_forced_stop_tokens():
    program = SummingProgram()
    tokens = run(program, plan_of(program, 6, stop=(3,)), PROMPT, [3, 3, 3])[2]
    assert len(tokens) == 4


def test_stepped_program_without_steps_returns_prefill():
    program = SummingProgram()
    logits, _, tokens, _ = run(program, plan_of(program, 0), PROMPT)
    np.testing.assert_array_equal(logits, logits_of(PROMPT))
    assert len(tokens) == 1


@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
    forced=st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
    chunk=st.integers(0, 14),
    slots=st.sampled_from([0, 24]),
)
def test_stepped_program_outputs_do_not_depend_on_chunk_size(
    prompt: list[int], forced: list[int], chunk: int, slots: int
):
    whole, chunked = SummingProgram(slots), SummingProgram(slots)
    expected = run(whole, plan_of(whole, 6), prompt, forced)
    found = run(chunked, plan_of(chunked, 6, chunk=chunk), prompt, forced)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    sizes = [one[0].shape[1] for one in chunked.fed[: -(-len(prompt) // (chunk or len(prompt)))]]
    assert sum(sizes) == len(prompt) and max(sizes) <= (chunk or len(prompt))


def test_static_cache_equals_growing_cache():
    grows, static = SummingProgram(), SummingProgram(slots=8)
    expected = run(grows, plan_of(grows, 4), PROMPT)
    found = run(static, plan_of(static, 4), PROMPT)
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(found[3][:, :8], expected[3])
    mask = static.fed[0][3][0, 0]
    assert mask.tolist() == [[slot <= row for slot in range(8)] for row in range(4)]
    assert static.fed[1][3][0, 0].tolist() == [[True] * 5 + [False] * 3]


class MaskedProgram(SummingProgram):
    """Decoder with a growing cache that adds up the entries that the mask shows."""

    def __init__(self, *, rejects_empty: bool) -> None:
        super().__init__()
        self.rejects_empty = rejects_empty
        self.inputs += (TensorSpec("mask", "int64", (1, "total")),)

    def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
        ids, _, cache, mask = inputs
        shown = cache[:, mask[0, : cache.shape[1]] == 1]
        logits, _ = super().step([ids, inputs[1], shown, mask])
        _, kept = super().step([ids, inputs[1], cache, mask])
        return [logits, kept]


def test_cache_with_hidden_entry_equals_empty_cache():
    usual, hidden = MaskedProgram(rejects_empty=False), MaskedProgram(rejects_empty=True)
    plan = plan_of(usual, 3)
    for ours, theirs in zip(run(hidden, plan, PROMPT), run(usual, plan, PROMPT), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    caches = [fed[2].shape[1] for fed in hidden.fed[1::2]]
    assert caches == [1, 5, 6, 7]
    assert [fed[3].tolist()[0] for fed in hidden.fed[1:4:2]] == [[0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]]


def test_program_without_mask_starts_with_empty_cache():
    """Without a mask, the program would use the entry."""
    program: Any = SummingProgram()
    program.rejects_empty = True
    assert not plan_of(program, 1).can_hide_entry(program.inputs)
    run(program, plan_of(program, 1), PROMPT, [3])
    assert program.fed[0][2].shape == (1, 0, 4)


def test_program_with_one_token_per_call_runs_prompt_token_by_token():
    program = SummingProgram(tokens=1)
    logits, positions, *_ = run(program, plan_of(program, 1), PROMPT, [3])
    np.testing.assert_array_equal(logits, logits_of([*PROMPT, 3]))
    assert positions.tolist() == [0, 1, 2, 3, 4] and len(program.fed) == 5


def test_program_with_last_logits_returns_row_per_call():
    program = SummingProgram(last=True)
    logits, positions, *_ = run(program, plan_of(program, 2, chunk=3), PROMPT, [3, 5])
    assert positions.tolist() == [2, 3, 4, 5]
    np.testing.assert_array_equal(logits, logits_of([*PROMPT, 3, 5])[2:])


def test_stepped_program_runs_other_prompt_between_runs():
    program = SummingProgram()
    stepped = SteppedProgram(program, plan_of(program, 1))
    stepped.bind([ids(PROMPT), ids([3]), ids([5, 5])])
    seen = []
    for _ in range(3):
        stepped.renew()
        stepped.run()
        seen.append([array.copy() for array in stepped.fetch()])
        assert [call.tokens for call in stepped.calls] == [4, 1], "calls of the other prompt are not counted"
    assert [one[0].shape[1] for one in program.fed] == [4, 1, 2, 4, 1, 2, 4, 1]
    assert program.renewed == 1
    for one in seen[1:]:
        np.testing.assert_array_equal(one[0], seen[0][0])


def test_other_prompt_reveals_state_between_prompts():
    class Stale(SummingProgram):
        """Keeps entries of the previous prompt in a cache of its own."""

        left = np.zeros(4, np.float32)

        def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
            logits, cache = super().step(inputs)
            before, self.left = self.left, cache[0].sum(0)
            return [logits + before.sum(), cache]

    program = Stale()
    stepped = SteppedProgram(program, plan_of(program, 0))
    stepped.bind([ids(PROMPT), ids(NONE), ids([5, 5])])
    first, second = [], []
    for outputs in (first, second):
        stepped.renew()
        stepped.run()
        outputs += stepped.fetch()
    assert not np.array_equal(first[0], second[0])


def test_program_may_overwrite_consumed_cache():
    class InPlace(SummingProgram):
        def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
            logits, cache = super().step(inputs)
            inputs[2][...] = np.nan
            return [logits, cache]

    program, right = InPlace(slots=8), SummingProgram(slots=8)
    found, expected = (run(one, plan_of(one, 3), PROMPT) for one in (program, right))
    np.testing.assert_array_equal(found[0], expected[0])


def test_program_may_reuse_memory_of_logits():
    class Reusing(SummingProgram):
        memory = np.zeros((1, 1, VOCABULARY), np.float32)

        def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
            logits, cache = super().step(inputs)
            self.memory[...] = logits
            return [self.memory, cache]

    program = Reusing(last=True)
    logits = run(program, plan_of(program, 3), PROMPT)[0]
    assert len(np.unique(logits, axis=0)) > 1


def test_program_without_step_copies_cache():
    class Bound:
        """The summing program with only bind, run and fetch."""

        def __init__(self) -> None:
            self._own = SummingProgram()
            self.inputs, self.outputs, self.function = self._own.inputs, self._own.outputs, "main"
            self._made: list[Array] = []

        def bind(self, inputs: list[Array]) -> None:
            self._inputs = inputs

        def run(self) -> None:
            self._made = list(self._own.step(self._inputs))

        def fetch(self) -> list[Array]:
            return self._made

    program = Bound()
    stepped = SteppedProgram(program, plan_of(SummingProgram(), 3))
    assert isinstance(stepped._program, BoundSteps) and stepped.placement() is None
    found = run(program, plan_of(SummingProgram(), 3), PROMPT)
    np.testing.assert_array_equal(found[0], logits_of([*PROMPT, *found[2][:-1]]))


def test_stepped_program_passes_constant_inputs():
    class Scaled(SummingProgram):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = (*self.inputs, TensorSpec("scale", "float32", ()))

        def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
            logits, cache = SummingProgram().step(inputs[:3])
            return [logits * inputs[3], cache]

    program = Scaled()
    rules = ((0, StepRule.TOKENS), (1, StepRule.POSITIONS))
    stepped = SteppedProgram(program, StepsPlan(rules, ((2, 1),), 0, 1, shapes=((1, 0, 4),)))
    assert [spec.name for spec in stepped.inputs] == ["prompt", "forced", "other_prompt", "scale"]
    stepped.bind([ids(PROMPT), ids(NONE), ids(NONE), np.array(2, np.float32)])
    stepped.run()
    np.testing.assert_array_equal(stepped.fetch()[0][:4], 2 * logits_of(PROMPT))


def test_stepped_program_limits_recorded_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stepped_program, "MAX_CALLS", 3)
    program = SummingProgram()
    stepped = SteppedProgram(program, plan_of(program, 6))
    stepped.bind([ids(PROMPT), ids(NONE), ids(NONE)])
    stepped.run()
    assert [call.tokens for call in stepped.calls] == [4, 1, 1] and len(stepped.fetch()[2]) == 7
    assert all(call.start_ns <= call.end_ns for call in stepped.calls)


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("int64", (1, "sequence"), [[3, 4]]),
        ("int32", ("sequence",), [3, 4]),
        ("int64", (1, 1), [[3]]),
        ("int64", (1,), [3]),
        ("int64", (), 3),
        ("float32", (3, 1, "sequence"), None),
    ],
)
def test_positions_rule_fills_every_shape(dtype: str, shape: tuple[Any, ...], expected: Any):
    made = steps._make_positions(TensorSpec("p", dtype, shape), [5, 6], 3)
    assert made.dtype.name == dtype
    assert made.tolist() == ([[[3, 4]]] if expected is None else expected)


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("int64", (1, "total"), [[1, 1, 1]]),
        ("int64", (1, 5), [[1, 1, 1, 0, 0]]),
        ("bool", ("sequence", "total"), [[True, True, True]]),
        ("bool", (1, 1, "sequence", 4), [[[[True, True, False, False], [True, True, True, False]]]]),
        ("uint8", (1, "sequence", "total"), [[[1, 1, 0], [1, 1, 1]]]),
    ],
)
def test_mask_rule_shows_earlier_positions(dtype: str, shape: tuple[Any, ...], expected: Any):
    made = steps._make_mask(TensorSpec("m", dtype, shape), [5, 6], 1)
    assert made.dtype.name == dtype and made.tolist() == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_mask_rule_adds_finite_numbers_to_floats(dtype: str):
    made = steps._make_mask(TensorSpec("m", dtype, (1, 1, "sequence", 4)), [5, 6], 1).astype(np.float64)
    assert np.isfinite(made).all() and (made[made != 0] < -60_000).all()
    assert (made[0, 0] == 0).tolist() == [[True, True, False, False], [True, True, True, False]]


def test_length_rules_fill_scalars_and_vectors():
    assert steps._make_length(TensorSpec("n", "int32", ()), [5, 6], 3).tolist() == 5
    assert steps._make_last(TensorSpec("n", "int32", ("batch",)), [5, 6], 3).tolist() == [4]
    assert steps._make_last(TensorSpec("n", "int32", ("batch", 1)), [5, 6], 3).tolist() == [[4]]


def test_stepped_outputs_describe_logits_and_cache():
    program = SummingProgram()
    specs = make_stepped_outputs(program.outputs, plan_of(program, 1))
    assert [spec.name for spec in specs] == ["logits", "positions", "tokens", "new_cache"]
    assert specs[0].shape == ("rows", VOCABULARY)


@pytest.mark.parametrize(
    ("prompt", "forced", "other", "message"),
    [
        ([], [], [], "the prompt is empty"),
        ([1] * 6, [], [], "9 tokens exceed the cache of 8 tokens"),
        ([1] * 6, [1] * 3, [], "9 tokens exceed the cache of 8 tokens"),
        ([1], [], [1] * 9, "exceed the cache of 8 tokens"),
    ],
)
def test_stepped_program_rejects_prompts_that_do_not_fit(
    prompt: list[int], forced: list[int], other: list[int], message: str
):
    program = SummingProgram(slots=8)
    stepped = SteppedProgram(program, plan_of(program, 3))
    with pytest.raises(UsageError, match=message):
        stepped.bind([ids(prompt), ids(forced), ids(other)])


@pytest.mark.parametrize("shape", [(), (1, 0), (1, 8, 3), (1, -1, 4), (1, 1 << 63, 4)])
def test_stepped_program_rejects_cache_of_wrong_shape(shape: tuple[int, ...]):
    program = SummingProgram()
    with pytest.raises(UsageError):
        SteppedProgram(program, replace(plan_of(program, 3), shapes=(shape,)))


@pytest.mark.parametrize("forced", [[], [1, 2, 3]])
def test_stepped_program_fills_whole_cache(forced: list[int]):
    program = SummingProgram(slots=8)
    logits = run(program, plan_of(program, 3), [1] * 5, forced)[0]
    assert len(logits) == 8


def test_stepped_program_rejects_fixed_number_of_tokens():
    program = SummingProgram(tokens=16)
    with pytest.raises(UsageError, match="takes 16 tokens per call, expected 1 or any number"):
        SteppedProgram(program, plan_of(program, 3))


def test_stepped_program_rejects_wrong_number_of_rows():
    class Short(SummingProgram):
        def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
            logits, cache = super().step(inputs)
            return [logits[:, :2], cache]

    program = Short()
    with pytest.raises(RunFailed, match="2 rows of logits for 4 tokens"):
        run(program, plan_of(program, 3), PROMPT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rules": ((0, StepRule.TOKENS), (0, StepRule.POSITIONS))}, r"invalid steps: inputs \[0, 0, 2\]"),
        ({"rules": ((0, StepRule.TOKENS), (2, StepRule.POSITIONS))}, r"invalid steps: inputs \[0, 2, 2\]"),
        ({"rules": ((9, StepRule.TOKENS),)}, r"inputs \[9, 2\] are repeated or out of range; the program has 3 inputs"),
        ({"rules": ((-1, StepRule.TOKENS),)}, r"invalid steps: inputs \[-1, 2\]"),
        ({"rules": ()}, "one input must take the tokens"),
        ({"rules": ((0, StepRule.TOKENS), (1, StepRule.TOKENS))}, "one input must take the tokens"),
        ({"feedback": ((2, 2),)}, r"outputs \[0, 2\] are out of range; the program has 2 outputs"),
        ({"logits": 5}, r"invalid steps: outputs \[5, 1\]"),
        ({"logits": -1}, r"invalid steps: outputs \[-1, 1\]"),
        ({"shapes": ()}, "0 shapes for 1 cache tensors"),
        ({"steps": MAX_STEPS + 1}, "65537 steps"),
        ({"steps": -1}, "-1 steps"),
        ({"chunk": -1}, "invalid steps"),
        ({"bound": -1}, "invalid steps"),
        ({"prompts": (PromptFunction("f", (0, 1, 2), (0, 1)),) * (MAX_PROMPT_FUNCTIONS + 1)}, "65 prompt functions"),
        ({"prompts": (PromptFunction("f", (0, 1), (0, 1)),)}, r"function 'f' has invalid inputs \(0, 1\)"),
        ({"prompts": (PromptFunction("f", (-1, 1, 2), (0, 1)),)}, r"has invalid inputs \(-1, 1, 2\)"),
        ({"prompts": (PromptFunction("f", (0, 1, -1), (0, 1)),)}, r"has invalid inputs \(0, 1, -1\)"),
        ({"prompts": (PromptFunction("f", (0, 1, 2), (0, 1, 2)),)}, r"function 'f' has invalid outputs \(0, 1, 2\)"),
        ({"prompts": (PromptFunction("f", (0, 1, 2), (0, -1)),)}, r"has invalid outputs \(0, -1\)"),
    ],
)
def test_plan_check_rejects_invalid_plans(change: dict[str, Any], message: str):
    values = {**vars(plan_of(SummingProgram(), 3)), **change}
    with pytest.raises(UsageError, match=message):
        StepsPlan(**values).check(3, 2)


def test_plan_json_round_trip():
    prompts = (PromptFunction("f", (0, 1, 2, -1), (-1, 1)),)
    plan = plan_of(SummingProgram(slots=8), 3, chunk=2, stop=(0, 5), prompts=prompts)
    assert StepsPlan.from_json(plan.to_json()) == plan


_PLAN = plan_of(SummingProgram(), 3).to_json()
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["tokens", "mask", "", "x"])
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@given(st.dictionaries(st.sampled_from([*_PLAN, "other"]), values, max_size=4), st.sets(st.sampled_from([*_PLAN])))
def test_plan_of_json_raises_usage_error_for_any_value(changed: dict[str, Any], missing: set[str]):
    found = {name: value for name, value in {**_PLAN, **changed}.items() if name not in missing}
    try:
        plan = StepsPlan.from_json(found)
        plan.check(3, 2)
    except UsageError:
        return
    assert StepsPlan.from_json(plan.to_json()) == plan
    range(plan.steps)


class Prefilling(SummingProgram):
    """Decoder with a token per call, and functions for prompts whose inputs have another order."""

    def __init__(self, slots: int = 24) -> None:
        super().__init__(slots, tokens=1)
        self.calls: list[str] = []

    def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
        self.calls.append("decode")
        return super().step(inputs)

    def open_function(self, name: str) -> Any:
        calls = self.calls

        class Prefill(SummingProgram):
            def __init__(self, slots: int) -> None:
                super().__init__(slots, tokens=None if name == "any" else int(name))
                self.inputs, self.outputs = self.inputs[::-1], self.outputs[::-1]

            def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
                calls.append(name)
                self.inputs = self.inputs[::-1]
                made = super().step(inputs[::-1])
                self.inputs = self.inputs[::-1]
                return made[::-1]

        return Prefill(self.slots)


def prefilling_plan(program: Prefilling, names: Sequence[str], *, logits: bool = False, **more: Any) -> StepsPlan:
    functions = [PromptFunction(name, (3, 2, 1, 0), (1 if logits else -1, 0)) for name in names]
    return plan_of(program, 9, prompts=tuple(functions), **more)


@pytest.mark.parametrize(
    ("names", "count", "chunk", "calls"),
    [
        (["4", "2"], 1, 0, ["decode"]),
        (["4", "2"], 2, 0, ["decode", "decode"]),
        (["4", "2"], 3, 0, ["2", "decode"]),
        (["2", "4"], 4, 0, ["4", "decode"]),
        (["4", "2"], 11, 0, ["4", "4", "2", "decode"]),
        (["4", "2"], 12, 0, ["4", "4", "4", "decode"]),
        (["4"], 6, 0, ["4", "decode", "decode"]),
        (["4"], 9, 2, ["4", "4", "4", "4", "decode"]),
        (["4", "2"], 9, 1, ["decode"] * 9),
        (["4", "2"], 9, 3, ["4", "4", "2", "decode"]),
        (["16"], 9, 0, ["16", "decode"]),
        (["16"], 20, 0, ["16", "decode", "decode", "decode", "decode"]),
        (["any"], 9, 0, ["any", "decode"]),
        (["any", "4"], 9, 3, ["any", "any", "any", "decode"]),
        ([], 3, 0, ["decode", "decode", "decode"]),
    ],
)
@pytest.mark.parametrize("has_logits", [False, True])
def test_stepped_program_splits_prompt(
    names: list[str], count: int, chunk: int, calls: list[str], has_logits: bool
) -> None:
    program, prompt = Prefilling(), [1, 4, 2, 6, 3] * 4
    plan = prefilling_plan(program, names, logits=has_logits, chunk=chunk)
    logits, positions, tokens, cache = run(program, plan, prompt[:count], [5, 5])
    assert program.calls == [*calls, "decode", "decode"]
    expected = logits_of([*prompt[:count], 5, 5])
    if has_logits or not names:
        assert positions.tolist() == list(range(count + 2))
    np.testing.assert_array_equal(logits, expected[positions])
    assert tokens.tolist() == np.argmax(expected[count - 1 :], -1).tolist()
    right = run(SummingProgram(24), plan_of(SummingProgram(24), 9), prompt[:count], [5, 5])[3]
    np.testing.assert_array_equal(cache[:, : count + 2], right[:, : count + 2])


@pytest.mark.parametrize(
    ("count", "calls"), [(6, ["decode"] * 6), (17, ["16", "decode"]), (20, ["16", *["decode"] * 4])]
)
def test_stepped_program_does_not_pad_growing_cache(count: int, calls: list[str]):
    program, prompt = Prefilling(slots=0), ([1, 4, 2, 6, 3] * 4)[:count]
    plan = plan_of(program, 9, prompts=(PromptFunction("16", (2, 1, 0), (-1, 0)),))
    logits, positions, _, cache = run(program, plan, prompt, [5])
    assert program.calls == [*calls, "decode"]
    np.testing.assert_array_equal(logits, logits_of([*prompt, 5])[positions])
    assert cache.shape == (1, count + 1, 4)


def test_stepped_program_does_not_pad_state():
    program = Prefilling()
    ids, positions, cache, mask = program.inputs
    program.inputs = (ids, positions, replace(cache, name="past_conv.0"), mask)
    run(program, prefilling_plan(program, ["16", "4"]), [1, 4, 2, 6, 3, 0, 5], [3])
    assert program.calls == ["4", "decode", "decode", "decode", "decode"]


@pytest.mark.parametrize(("shape", "is_single"), [((), True), ((1, 1), True), ((1, 4), False), ((1, None), False)])
def test_steps_plan_takes_single_tokens(shape: tuple[int | None, ...], is_single: bool):
    plan = StepsPlan(((1, StepRule.TOKENS), (0, StepRule.POSITIONS)), (), 0, 1)
    assert plan.tokens == 1
    assert plan.takes_single_tokens([TensorSpec("p", "int64", ()), TensorSpec("t", "int64", shape)]) is is_single


def test_steps_plan_finds_axes_of_positions():
    shapes = {"k": (1, 8, 8, 64), "v": (1, 8, 64, 16), "past_conv.0": (1, 8, 3), "x": (1, 4, 3), "grows": (1, 2, 0, 8)}
    program = [TensorSpec(name, "float32", shape) for name, shape in shapes.items()]
    feedback = tuple((place, place) for place in range(len(program)))
    plan = StepsPlan((), feedback, 0, 1, bound=8, shapes=tuple(shapes.values()))
    assert plan.find_axes(program) == [2, 1, None, None, 2]
    assert replace(plan, bound=0).find_axes(program) == [None, None, None, None, 2]


def test_stepped_program_drops_logits_of_padding():
    class Last(Prefilling):
        def open_function(self, name: str) -> Any:
            opened = super().open_function(name)
            opened.last = True
            return opened

    program = Last()
    logits, positions, *_ = run(program, prefilling_plan(program, ["4"], logits=True), [1, 4, 2, 6, 3, 0, 5, 1], [3])
    assert positions.tolist() == [3, 7, 8], "the second call has a token of padding"
    np.testing.assert_array_equal(logits, logits_of([1, 4, 2, 6, 3, 0, 5, 1, 3])[positions])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (PromptFunction("4", (3, 2, 1, -1), (-1, 0)), "function '4' has 4 inputs and 2 outputs"),
        (PromptFunction("4", (3, 2, 1, 7), (-1, 0)), "function '4' has 4 inputs and 2 outputs"),
        (PromptFunction("4", (3, 2, 1, 0), (-1, 2)), "function '4' has 4 inputs and 2 outputs"),
        (PromptFunction("4", (1, 2, 3, 0), (-1, 0)), "input ids: 1x4 int64 does not take an empty cache"),
    ],
)
def test_stepped_program_rejects_misfit_prompt_function(function: PromptFunction, message: str):
    program = Prefilling()
    with pytest.raises(UsageError, match=message):
        SteppedProgram(program, replace(prefilling_plan(program, []), prompts=(function,)))


def test_stepped_program_rejects_prompt_function_without_support():
    program = SummingProgram(24, tokens=1)
    plan = plan_of(program, 3, prompts=(PromptFunction("f", (0, 1, 2, 3), (0, 1)),))
    with pytest.raises(UsageError, match="this runtime cannot run function 'f' on the prompt"):
        SteppedProgram(program, plan)
