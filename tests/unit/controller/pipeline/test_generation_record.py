"""The record of a generation, its times, and its lines on the screen."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from support.generations import place_tokens, stored_generation
from support.run_records import run_case

from hil.compare.generation.judge import judge_generation
from hil.compare.generation.results import (
    CacheErrors,
    FaultKind,
    Generated,
    GenerationFault,
    GenerationVerdict,
    RowResult,
)
from hil.controller.models.generation.roles import Decoder
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.generation import measure_generation, record_generation
from hil.controller.pipeline.records.print_case import print_case
from hil.controller.pipeline.records.print_generation import describe_perplexity, describe_texts
from hil.controller.pipeline.records.record import record_case
from hil.controller.pipeline.settings.options import Options
from hil.controller.records.measurements.generation import MAX_COLUMNS, MAX_LAYERS, MAX_ROWS, StoredPerplexity
from hil.controller.records.run import make_run_case
from hil.core.repetition import Answer, Repetition
from hil.core.results import Outcome, RunResult
from hil.core.steps import FORCED, PROMPT, TOKENS, TURN_END, StepCall, StepRule, StepsPlan

UNSTABLE = Repetition((Answer(1, 0), Answer(1, 1)), differing=("logits",)).record()
PLAN = StepsPlan(rules=((0, StepRule.TOKENS),), feedback=((1, 1),), logits=0, steps=3, bound=64)


def make_calls(start: int, *calls: tuple[int, int], gap: int = 10) -> list[StepCall]:
    """Return calls of (tokens, duration), with gaps between them."""
    found = []
    for tokens, duration in calls:
        found.append(StepCall(tokens, start, start + duration))
        start += duration + gap
    return found


def make_result(iterations: Sequence[tuple[int, int]] = (), tokens: Sequence[int] = (7, 8, 9, 4)) -> RunResult:
    return RunResult("sim", {TOKENS: np.array(tokens, np.int64)}, tuple(iterations))


def make_row(position: int, kl: float = 1e-9, *, passed: bool = True) -> RowResult:
    return RowResult(position, kl, 1e-5, 0.5, 7, 7, passed)


def make_verdict(*rows: RowResult, **values: Any) -> GenerationVerdict:
    return GenerationVerdict(
        **{"outcome": Outcome.PASS, "reason": "", "rows": rows, "kl_bound": 1e-6, "error_bound": 1e-4, **values}
    )


def make_case(judged: GenerationVerdict | None = None) -> Case:
    inputs = {PROMPT: np.array([1, 2], np.int64), FORCED: np.empty(0, np.int64)}
    calls = make_calls(1000, (2, 200), (1, 50), (1, 60), (1, 70))
    return Case(
        "net-p",
        Path("net.onnx"),
        Options(prompt="p"),
        Path(),
        inputs=inputs,
        result=make_result([(900, 1500)]),
        decoder=Decoder(PLAN, (), ()),
        calls=tuple(calls),
        generation=judged,
    )


def show_case(judged: GenerationVerdict, **values: Any) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_case(console, run_case(generation=record_generation(make_case(judged)), verdicts=[], **values))
    return console.file.getvalue()


def test_times_separate_prompt_steps_and_sampling():
    calls = make_calls(1000, (2, 200), (1, 50), (1, 60), (1, 70))
    times = measure_generation(make_result([(900, 1500)]), calls, [1, 2], [3] * 4)
    assert times is not None and (times.iterations, times.steps) == (1, 3)
    assert (times.ttft_ns, times.prefill_ns, times.decode_ns) == (300, [200], [180])
    assert (times.tpot_p50_ns, times.tpot_max_ns, times.sampling_ns) == (60, 70, 10)
    assert times.prefill_tokens_per_s == pytest.approx(2 / 200e-9)
    assert times.decode_tokens_per_s == pytest.approx(3 / 180e-9)


def test_times_use_medians_of_iterations():
    slow = make_calls(9000, (1, 100), (1, 500), (1, 90))
    calls = [
        *make_calls(0, (1, 100), (1, 100), (1, 50)),
        *make_calls(5000, (1, 110), (1, 110), (1, 60)),
        *slow,
    ]
    times = measure_generation(make_result([(0, 1000), (5000, 6000), (9000, 9990)]), calls, [1, 2], [3] * 4)
    assert times is not None and times.prefill_ns == [200, 220, 600]
    assert times.ttft_ns == 230  # the second iteration, with a gap
    assert times.step_ns == [60] and times.decode_ns == [50, 60, 90]


def test_times_separate_turns():
    calls = make_calls(1000, (2, 200), (1, 50), (1, 300), (1, 60))
    times = measure_generation(make_result([(900, 1900)]), calls, [1, 2, TURN_END, 3], [4, 4, TURN_END, 5, 5])
    assert times is not None and (times.ttft_ns, times.prefill_ns, times.decode_ns) == (300, [500], [110])
    assert times.step_ns == [50, 60] and times.prefill_tokens_per_s == pytest.approx(3 / 500e-9)


def test_perplexity_of_text_combines_windows():
    windows = [
        StoredPerplexity(tokens=30, board_nats=2.0, reference_nats=2.0, error_nats=0.003, file="a.txt"),
        StoredPerplexity(tokens=10, board_nats=1.0, reference_nats=0.96, error_nats=0.004, file="a.txt"),
    ]
    cases = [
        run_case(name=f"net-a-window-{number}", generation=stored_generation(perplexity=one.to_json()))
        for number, one in enumerate(windows, 1)
    ]
    (text,) = describe_texts([*cases, run_case(generation=stored_generation())])
    mean, error = 0.01, math.hypot(0.75 * 0.003, 0.25 * 0.004)
    low, high = (math.exp(mean + sign * 1.96 * error) for sign in (-1, 1))
    assert text.startswith("perplexity of net-a (a.txt): 5.7546 over 40 tokens, reference 5.6973, ratio 1.01005")
    assert f"(95 %: {low:.6g} to {high:.6g})" in text
    assert not list(describe_texts(cases[:1])), "a single window has the numbers in its case"
    failed = run_case(name="net-a-window-3")
    other = [msgspec.structs.replace(case, name=case.name.replace("net", "big")) for case in cases]
    first, second = describe_texts([*cases, failed, *other])
    assert first.endswith("1 window of 3 without result") and second.startswith("perplexity of big-a (a.txt)")


def test_perplexity_shows_nan():
    found = StoredPerplexity(tokens=3, board_nats=math.nan, reference_nats=1.0, error_nats=0.1)
    assert describe_perplexity([found])[0] == "nan over 3 tokens"


def test_times_drop_iteration_with_missing_calls():
    calls = [*make_calls(0, (2, 100), (1, 50)), *make_calls(5000, (1, 100))]
    times = measure_generation(make_result([(0, 1000), (5000, 6000)]), calls, [1, 2], [3] * 4)
    assert times is not None and times.iterations == 1 and times.prefill_ns == [100]


def test_times_without_steps_have_no_tpot():
    times = measure_generation(make_result([(0, 1000)]), make_calls(0, (2, 100)), [1, 2], [3])
    assert times is not None and times.ttft_ns == 100
    assert times.tpot_p50_ns is times.decode_tokens_per_s is times.sampling_ns is None
    assert times.decode_ns == times.step_ns == []


@pytest.mark.parametrize("iterations", [[], [(10_000, 20_000)]])
def test_times_are_unknown_without_calls_of_iteration(iterations: list[tuple[int, int]]):
    assert measure_generation(make_result(iterations), make_calls(0, (2, 100)), [1, 2], [3]) is None


def test_record_has_tokens_positions_and_fault():
    fault = GenerationFault(FaultKind.LAYER, 3, 2, "present.2.value", 1, "decode only")
    rows = [make_row(1), make_row(2), make_row(3, float("nan"), passed=False)]
    judged = make_verdict(*rows, outcome=Outcome.FAIL, fault=fault, top={1: 0.5, 5: 0.9}, first_divergent=2)
    values = json.loads(json.dumps(record_case(make_case(judged), {}).to_json(), allow_nan=False))
    found = make_run_case(values).generation
    assert found is not None and found.fault is not None
    assert (found.prompt, found.prompt_tokens, found.tokens, found.steps) == ("p", [1, 2], [7, 8, 9, 4], 3)
    assert (found.fault.kind, found.fault.layer, found.fault.step) == ("layer", 1, 2)
    assert (found.top1, found.top5, found.top100, found.first_divergent) == (0.5, 0.9, None, 2)
    assert [(row.position, row.passed) for row in found.positions] == [(1, True), (2, True), (3, False)]
    assert found.positions[2].kl == "nan" and found.bound == 64


def test_record_keeps_times_without_verdict():
    found = record_generation(make_case())
    assert found is not None and found.times is not None and found.positions == [] and found.kl_bound is None


def test_record_keeps_wrong_positions_of_long_generation():
    wrong = make_row(MAX_ROWS + 50, 2.0, passed=False)
    found = record_generation(make_case(make_verdict(*map(make_row, range(MAX_ROWS + 40)), wrong)))
    assert found is not None and len(found.positions) == MAX_ROWS and found.positions[-1].position == wrong.position


def test_top1_counts_lowest_token_of_equal_logits():
    logits = np.zeros((3, 200))
    logits[:, [150, 7]] = 1.0
    generated = Generated(place_tokens(1, 3), np.arange(3), logits, np.full(3, 7))
    assert judge_generation(generated, generated, generated).top[1] == 1.0
    lower = logits - np.eye(200)[150] * 1e-9
    same = judge_generation(generated, replace(generated, logits=lower), generated)
    assert same.top[1] == 1.0 and same.first_divergent is None


def test_case_without_decoder_has_no_generation():
    assert record_generation(replace(make_case(), decoder=None)) is None


def test_screen_shows_tokens_divergence_and_times():
    text = show_case(make_verdict(make_row(1), make_row(2, 3e-7), top={1: 1.0}, notes=("one near-tie",)))
    assert "prompt of 2, 3 steps (chosen by the board), same as the reference" in text
    assert "worst KL 3e-07 at position 2, bound 1e-06" in text and "top-1 100 %" in text
    assert "note         one near-tie" in text
    assert "TTFT         300 ns" in text and "TPOT         p50 60 ns" in text and "at depth 2 to 4 of 64" in text
    assert max(map(len, text.splitlines())) <= 80


def test_screen_shows_nan_as_worst_divergence():
    rows = [make_row(1, 5.0, passed=False), make_row(2, float("nan"), passed=False)]
    text = show_case(make_verdict(*rows, outcome=Outcome.FAIL, first_divergent=0))
    assert "worst KL nan at position 2" in text and "token 0 differs from the reference" in " ".join(text.split())


def test_unstable_case_hints_at_cache():
    text = show_case(
        make_verdict(make_row(1)), outcome="UNSTABLE", reason="stale cache or unstable", repetition=UNSTABLE
    )
    assert "each prompt starts with an empty cache" in text.replace("\n               ", " ")
    assert "--allow-unstable" not in text and "tables" not in text


def test_record_maps_largest_errors_of_the_cache():
    errors = np.linspace(0.5, 1.5, 2 * MAX_COLUMNS + 1)
    errors[3] = np.nan
    cache = tuple(CacheErrors(f"{n}", n, is_key, errors) for n in range(MAX_LAYERS + 1) for is_key in (True, False))
    found = record_generation(make_case(make_verdict(cache=cache)))
    assert found is not None and found.cache is not None
    assert (found.cache.positions, found.cache.stride, found.cache.layers) == (2 * MAX_COLUMNS + 1, 3, 2)
    assert [row.layer for row in found.cache.rows] == list(range(0, MAX_LAYERS + 1, 2))
    row = found.to_json()["cache"]["rows"][-1]
    assert row["keys"] == row["values"] and len(row["keys"]) <= MAX_COLUMNS
    assert row["keys"][:2] == [0.504, "nan"] and row["keys"][-1] == 1.5


def test_times_on_the_host_include_the_link():
    case = replace(make_case(), link_ns=5000)
    found = record_generation(case)
    assert found is not None and found.times is not None
    assert (found.times.ttft_ns, found.times.host_ttft_ns) == (300, 5300)
    found = record_generation(make_case())
    assert found is not None and found.times is not None and found.times.host_ttft_ns is None
