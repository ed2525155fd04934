"""Faults of a simulated board that runs a decoder step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hil.core.steps import StepRule, StepsPlan
from hil.core.tensors import Array, TensorSpec
from hil.errors import UsageError
from hil.sim.faults import parse
from hil.sim.runtime import SimProgram

PROMPT, OTHER, FORCED = [3, 1, 4], [2, 7], [1, 5, 2]
PLAN = StepsPlan(
    rules=((0, StepRule.TOKENS), (1, StepRule.MASK), (2, StepRule.POSITIONS)),
    feedback=((3, 1), (4, 2), (5, 3), (6, 4)),
    shapes=((1, 0, 2),) * 4,
    logits=0,
    steps=3,
)


class Handle:
    """A value of the runtime, which is not an array."""

    def __init__(self, array: Array) -> None:
        self.array = array


class Toy:
    """Decoder with two layers. A cache entry is (token, position), and logit j is j * the sum of the visible tokens.

    Keys and values are equal.
    """

    function = "main"

    def __init__(self, mask: tuple[Any, ...] = (1, "total")) -> None:
        names = [f"past.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
        cache = tuple(TensorSpec(name, "float32", (1, "past", 2)) for name in names)
        self.inputs = (
            TensorSpec("tokens", "int64", (1, "sequence")),
            TensorSpec("mask", "int64", mask),
            TensorSpec("positions", "int64", (1, "sequence")),
            *cache,
        )
        self.outputs = (TensorSpec("logits", "float32", (1, "sequence", 4)), *cache)

    def step(self, inputs: Sequence[Any]) -> list[Handle]:
        tokens, mask, positions, *past = (one.array if isinstance(one, Handle) else one for one in inputs)
        new = np.stack([tokens, positions], -1).astype(np.float32)
        cache = [np.concatenate([entries, new], 1) for entries in past]
        count, total = tokens.shape[1], cache[0].shape[1]
        causal = np.arange(total) <= np.arange(total - count, total)[:, None]
        visible = mask.reshape(-1, total) * (causal if mask.ndim == 2 else 1)
        sums = (visible * cache[0][0, :, 0]).sum(-1)
        return [Handle(one) for one in (sums[None, :, None] * np.arange(4, dtype=np.float32), *cache)]

    def to_array(self, place: int, value: Handle) -> Array:
        return value.array


def sim_program(*faults: str, toy: Toy | None = None, **runtime: Any) -> SimProgram:
    given: Any = SimpleNamespace(**{"trigger_at": lambda *at: None, "compute_next_factor": lambda: 1.0, **runtime})
    return SimProgram(given, toy or Toy(), [parse(fault) for fault in faults])


def generate(*faults: str, runs: int = 1, plan: StepsPlan = PLAN, toy: Toy | None = None) -> dict[str, Array]:
    """Run the toy, and return logit 1 of each position, the tokens and the keys of both layers."""
    stepped = sim_program(*faults, toy=toy).stepped(plan)
    stepped.bind([np.array(one) for one in (PROMPT, FORCED, OTHER)])
    for _ in range(runs):
        stepped.renew()
        stepped.run()
    logits, positions, tokens, *cache = stepped.fetch()
    names = {"calls": np.array([call.tokens for call in stepped.calls]), "positions": positions, "tokens": tokens}
    return {"sums": logits[:, 1], **names, **{str(layer): one[0] for layer, one in enumerate(cache[::2])}}


def entries(tokens: Sequence[int], positions: Sequence[int]) -> list[list[float]]:
    return [list(map(float, pair)) for pair in zip(tokens, positions, strict=True)]


def test_sim_steps_without_faults_equal_program():
    made = generate("crash:at=load", runs=2)
    assert made["sums"].tolist() == [3, 4, 8, 9, 14, 16]
    assert made["calls"].tolist() == [3, 1, 1, 1] and made["tokens"].tolist() == [3, 3, 3, 3]
    assert made["0"].tolist() == made["1"].tolist() == entries(PROMPT + FORCED, range(6))


def test_kv_slot_fault_loses_entry_before():
    made = generate("kv_slot:position=4")
    # The step at position 4 no longer sees token 1 of position 3, and its entry is in the slot of that token.
    assert made["sums"].tolist() == [3, 4, 8, 9, 13, 15]
    assert made["0"].tolist() == [*entries(PROMPT, range(3)), [5, 4], [2, 5], [0, 0]]
    assert made["0"].tolist() == made["1"].tolist()


class Hybrid(Toy):
    """The toy with a recurrent state, which has the sum of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        state = TensorSpec("past_conv.2", "float32", (1, 4, 3))
        self.inputs, self.outputs = (*self.inputs, state), (*self.outputs, state)

    def step(self, inputs: Sequence[Any]) -> list[Handle]:
        state = inputs[-1].array if isinstance(inputs[-1], Handle) else inputs[-1]
        return [*super().step(inputs[:-1]), Handle(state + inputs[0].sum(dtype=np.float32))]


@pytest.mark.parametrize("fault", ["kv_slot:position=4", "overflow:position=2,layer=0", "wrong_layer:layer=0"])
def test_sim_steps_skip_states_without_slots(fault):
    plan = replace(PLAN, feedback=(*PLAN.feedback, (7, 5)), shapes=(*PLAN.shapes, (1, 4, 3)))
    made, right = generate(fault, plan=plan, toy=Hybrid()), generate(fault)
    np.testing.assert_array_equal(made["1"], right["1"])
    np.testing.assert_array_equal(made["2"], np.full((4, 3), sum(PROMPT + FORCED)))


def test_kv_slot_fault_needs_cache_with_slots():
    plan = replace(PLAN, feedback=((7, 5),), shapes=((1, 4, 3),))
    with pytest.raises(UsageError, match="fault kv_slot: the program has no cache inputs"):
        sim_program("kv_slot", toy=Hybrid()).stepped(plan)


def test_rope_fault_shifts_positions():
    made = generate("rope:position=2")
    assert made["0"].tolist() == entries(PROMPT + FORCED, [0, 1, 1, 2, 3, 4])


def test_mask_fault_hides_newest_token():
    for mask in ((1, "total"), (1, 1, "sequence", "total")):
        made = generate("mask", toy=Toy(mask))
        assert made["sums"].tolist() == [3, 3, 4, 8, 9, 14]
        assert made["positions"].tolist() == list(range(6))


def test_mask_fault_shows_next_token_of_call():
    made = generate("mask:how=show-next", toy=Toy((1, 1, "sequence", "total")))
    assert made["sums"].tolist() == [4, 8, 8, 9, 14, 16]


def test_stale_cache_fault_continues_after_other_prompt():
    assert generate("stale_cache")["sums"].tolist() == generate()["sums"].tolist()
    again = generate("stale_cache", runs=2)
    assert again["sums"].tolist() == [12, 13, 17, 18, 23, 25]
    assert again["0"].tolist() == entries(OTHER + PROMPT + FORCED, range(8))
    assert generate("stale_cache", runs=3)["sums"].tolist() == again["sums"].tolist()


def test_overflow_fault_affects_layers_above():
    made = generate("overflow:position=2,layer=0")
    assert np.isnan(made["sums"]).tolist() == [False, False, True, True, True, True]
    assert np.isfinite(made["0"]).all()
    assert np.isnan(made["1"][:, 0]).tolist() == [False, False, True, True, True, True]


def test_wrong_layer_fault_affects_steps_only():
    made = generate("wrong_layer:position=1,layer=0")
    right = entries(PROMPT + FORCED, range(6))
    assert made["0"].tolist() == right
    assert made["1"].tolist() == right[:3] + [[-token, position] for token, position in right[3:]]


def test_argmax_fault_picks_second_largest_logit():
    # The tokens follow the positions 2 to 5.
    assert generate("argmax:position=4")["tokens"].tolist() == [3, 3, 2, 2]


def test_slow_token_fault_delays_one_call(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("hil.sim.steps.time", SimpleNamespace(sleep=slept.append))
    generate("slow_token:position=4,seconds=2.5")
    assert slept == [2.5]


def test_sim_steps_trigger_faults_of_each_call():
    seen: list[Any] = []
    stepped = sim_program(trigger_at=lambda *at: seen.append(at)).stepped(PLAN)
    stepped.bind([np.array(one) for one in (PROMPT, FORCED[:1], OTHER)])
    stepped.run()
    assert seen == [("run", [], range(3)), ("run", [], range(3, 4))]


def test_corrupt_fault_changes_each_call():
    program = sim_program(
        "corrupt", corrupt=lambda arrays, outputs, number, faults, **_: [arrays[0] + 100 * number, *arrays[1:]]
    )
    stepped = program.stepped(PLAN)
    stepped.bind([np.array(one) for one in (PROMPT, FORCED, OTHER)])
    stepped.run()
    assert stepped.fetch()[0][:, 0].tolist() == [0, 0, 0, 100, 200, 300]


NO_CACHE = StepsPlan(rules=((0, StepRule.TOKENS),), feedback=(), logits=0, steps=3)


@pytest.mark.parametrize(
    ("fault", "plan", "message"),
    [
        ("kv_slot", NO_CACHE, "fault kv_slot: the program has no cache inputs"),
        ("stale_cache", NO_CACHE, "fault stale_cache: the program has no cache inputs"),
        ("overflow", NO_CACHE, "fault overflow: the program has no cache inputs"),
        (
            "wrong_layer:layer=1",
            PLAN,
            "fault wrong_layer: no layer above 1 has cache entries; the program has 2 layers",
        ),
        ("rope", NO_CACHE, "fault rope: the program has no input for the positions"),
        ("mask", NO_CACHE, "fault mask: the program has no input for the mask"),
        ("mask:how=show-next", PLAN, "fault mask: how=show-next needs a mask with a row per token"),
    ],
)
def test_sim_steps_reject_fault_without_effect(fault, plan, message):
    with pytest.raises(UsageError, match=message):
        sim_program(fault).stepped(plan)


def test_stale_cache_fault_needs_room_for_both_prompts():
    stepped = sim_program("stale_cache").stepped(StepsPlan(**{**vars(PLAN), "bound": 7}))
    with pytest.raises(UsageError, match="8 tokens exceed the cache of 7 tokens"):
        stepped.bind([np.array(one) for one in (PROMPT, FORCED, OTHER)])
