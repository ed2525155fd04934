"""Comparison of two decoders for each prompt."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hil.controller.analysis.bench.measure import BenchSide, measure
from hil.controller.analysis.bench.prompts import compare_prompts, describe_side, group_sides, split_prompts
from hil.controller.analysis.bench.stats import Batch, BenchJob
from hil.controller.models.generation.roles import Decoder
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import Job, Options
from hil.core.results import Artifact, Model, Outcome, RunResult
from hil.core.steps import FORCED, PROMPT, TOKENS, StepCall, StepRule, StepsPlan
from hil.core.tensors import TensorSpec
from hil.errors import ProtocolBroken

PLAN = StepsPlan(rules=((0, StepRule.TOKENS),), feedback=((1, 1),), logits=0, steps=2, bound=64)
ROUNDS = 10


def make_batch(label: str, number: int, prefill: int, step: int) -> Batch:
    """Return an iteration with a prompt of three tokens and two steps."""
    start = 10_000 * number
    ends = [start + prefill, start + prefill + step, start + prefill + 2 * step]
    begins = [start, *ends]
    calls = tuple(StepCall(size, begins[n], ends[n]) for n, size in enumerate((3, 1, 1)))
    return Batch(label, number, 0, np.array([start]), np.array([ends[-1] - start]), calls)


def make_side(label: str, prompt: str, prefill: int, step: int) -> BenchSide:
    """Return a side with a batch per round."""
    inputs = {PROMPT: np.arange(3), FORCED: np.empty(0, np.int64)}
    result = RunResult("sim", {TOKENS: np.arange(3)})
    options: Any = Options(prompt=prompt)
    case = Case(label, Path("a"), options, Path(), inputs=inputs, result=result, decoder=Decoder(PLAN, (), ()))
    batches = [make_batch(label, number, prefill, step) for number in range(ROUNDS)]
    board: Any = None
    return BenchSide(label, case, board, batches=batches)


def test_compare_prompts_separates_prefill_from_steps():
    sides = [make_side("A", "short", 1000, 100), make_side("A", "long", 2000, 100)]
    sides += [make_side("B", "short", 1000, 200), make_side("B", "long", 1000, 100)]
    assert [[side.label for side in group] for group in group_sides(sides)] == [["A", "B"]] * 2
    short, long = compare_prompts(sides, BenchJob(Job()))
    assert (short.prompt, long.prompt) == ("short", "long")
    assert [one.verdict for one in (short.prefill, short.ttft, short.tpot) if one] == ["no difference"] * 2 + ["slower"]
    assert [one.verdict for one in (long.prefill, long.ttft, long.tpot) if one] == ["faster"] * 2 + ["no difference"]
    assert short.tpot is not None and round(short.tpot.ratio, 6) == 2 and short.tpot.rounds == ROUNDS
    assert compare_prompts(sides[:1], BenchJob(Job())) == []


def test_side_has_times_of_all_batches():
    found = describe_side(make_side("A", "short", 1000, 100))
    assert found is not None and found.times is not None
    assert (found.prompt, found.prompt_tokens, found.depths, found.bound) == ("short", 3, [3, 4], 64)
    assert (found.times.iterations, found.times.ttft_ns, found.times.tpot_p50_ns) == (ROUNDS, 1000, 100)


def test_per_prompt_selects_each_prompt(tmp_path: Path):
    spec = tmp_path / "p.toml"
    spec.write_text('[[prompt]]\nname = "a"\ntokens = [1]\n[[prompt]]\ntokens = [2]\n')
    assert [one.prompt for one in split_prompts(Options(generate=spec))] == ["a", "prompt-2"]
    assert split_prompts(Options()) == [Options()]


class BrokenBoard:
    """A board, and its program, that returns a token in another form."""

    def load(self, *arguments: Any, **options: Any) -> BrokenBoard:
        return self

    def run(self, inputs: Any, **options: Any) -> Any:
        return RunResult("sim", {TOKENS: np.zeros((1, 3), np.int64)}, ((0, 1),)), None

    def unload(self) -> None:
        pass


def test_measure_rejects_outputs_that_do_not_fit():
    specs = (TensorSpec("logits", "float32", (1, "n", 7)), TensorSpec("present", "float32", (1, "n", 4)))
    model = Model("m", "onnx", Path("m"), {}, "", inputs=(), outputs=specs)
    side = make_side("A", "short", 1000, 100)
    broken: Any = BrokenBoard()
    side.board = broken
    side.case = replace(side.case, model=model, artifact=Artifact("sim", "m", {}, {}, "main", "none"))
    with pytest.raises(ProtocolBroken, match="the board returned no valid output logits"):
        measure([side], BenchJob(Job(), iterations=1), lambda *_: None, random.Random(1))
    assert side.case.outcome is Outcome.BOARD_LOST
