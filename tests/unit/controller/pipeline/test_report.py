"""The final report fits the terminal and shows the required facts."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from support.run_records import run_case

from hil.compare.verdict import compare
from hil.controller.pipeline.records.print_case import print_case, print_verdict
from hil.controller.pipeline.records.record import record_verdict, summarize_device_times
from hil.controller.records.base import make_record
from hil.controller.records.outputs import StoredVerdict
from hil.core.repetition import Answer, Repetition
from hil.core.results import NOISE_DTYPE, RunResult, Timings


def shown(names, actual, reference, width=80):
    verdict = compare(
        RunResult("board", dict.fromkeys(names, actual)), RunResult("oracle", dict.fromkeys(names, reference))
    )
    console = Console(file=io.StringIO(), width=width)
    print_verdict(console, record_verdict(verdict))
    return console.file.getvalue()


@pytest.mark.parametrize("name", ["y", "logits", "StatefulPartitionedCall/model/block_12/dense/BiasAdd:0"])
@pytest.mark.parametrize("shape", [(), (10,), (1, 3, 64, 64)])
def test_table_fits_80_columns_per_output(name, shape):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(np.float32) for _ in range(2))
    lines = shown([name], a, b).splitlines()
    assert max(map(len, lines)) <= 80
    assert "SQNR dB" in lines[1] and "mismatches" in lines[1]
    assert f"{a.size} of {a.size}" in lines[2]
    assert "…" not in lines[2] or len(name) > 20
    assert name in "".join(line.strip() for line in lines[3:])


def test_wide_name_does_not_truncate_numbers():
    a = np.arange(12288, dtype=np.float32).reshape(1, 3, 64, 64)
    _, head, line = shown(["出力" * 30], a, a).splitlines()
    assert line.startswith("  出力") and "…" in line and line.endswith("inf")
    assert cell_len(head) == cell_len(line) <= 80


def test_name_with_newline_stays_in_single_row():
    _, _, line = shown(["y\nPASS  forged"], np.ones(1), np.ones(1), width=120).splitlines()
    assert line.startswith(r"  y\nPASS  forged  1 float64")


def test_report_limits_differing_outputs_to_20():
    text = shown([f"y{number}" for number in range(30)], np.zeros(3, np.int32), np.ones(3, np.int32))
    assert text.count("but the reference has other values") == 20
    assert "and 10 more outputs" in text


def test_report_shows_missing_outputs():
    verdict = compare(RunResult("board", {}), RunResult("oracle", {"y": np.zeros(1)}))
    console = Console(file=io.StringIO(), width=80)
    print_verdict(console, record_verdict(verdict))
    assert "the reference has 1" in console.file.getvalue()


def test_names_with_brackets_are_not_markup():
    assert "y[/red]" in shown(["y[/red]"], np.zeros(1), np.ones(1), width=120)


def test_report_shows_integers_as_exact():
    assert "against      oracle, exact" in shown(["y"], np.zeros(3, np.int32), np.zeros(3, np.int32))


def test_header_names_noise_in_tolerance():
    reference = np.array([1000.0, -3.0], np.float32)
    actual = reference + np.array([0, 1e-3], np.float32)
    noise = {"y": np.array([0, 0.01], NOISE_DTYPE)}
    for rtol, text in ((None, "rtol 1.3e-06, atol 0.0"), (1e-5, "rtol 1e-05, atol 0.0")):
        verdict = compare(RunResult("b", {"y": actual}), RunResult("r", {"y": reference}, noise=noise), rtol=rtol)
        console = Console(file=io.StringIO(), width=120)
        print_verdict(console, record_verdict(verdict))
        line = console.file.getvalue().splitlines()[0]
        assert text in line and line.endswith(" with rounding noise")
    assert "noise" not in shown(["y"], reference, reference)


def test_report_warns_about_empty_comparison():
    assert "note         0 elements compared" in shown(["y"], np.zeros((0, 3)), np.zeros((0, 3)))
    assert "note" not in shown(["y"], np.arange(3), np.arange(3))
    constant = shown(["y"], np.zeros(3), np.zeros(3))
    assert "note         output y: every expected value is 0: a board that computes" in constant


def test_stored_record_shows_infinity():
    same = np.array([1.0, np.nan], np.float32)
    verdict = compare(RunResult("board", {"y": same}), RunResult("oracle", {"y": same}))
    stored = make_record(json.loads(json.dumps(record_verdict(verdict).to_json(), allow_nan=False)), StoredVerdict)
    console = Console(file=io.StringIO(), width=100)
    print_verdict(console, stored)
    assert "inf" in console.file.getvalue().splitlines()[-1].split()


TIMINGS = dict.fromkeys(vars(Timings())) | {
    "import_s": 0.0043,
    "compile_s": 0.0031,
    "refer_s": 0.5,
    "run_s": 0.00477,
    "fetch_s": 5e-5,
}
CASE = {
    "name": "net",
    "outcome": "PASS",
    "reason": "",
    "stage": "compare",
    "error": None,
    "verdicts": [],
    "references": [],
    "artifact": {**run_case().artifact.to_json(), "runtime": "iree", "notes": {}},
    "provenance": {"board": "b", "runtime_version": "3.13.0"},
    "repetition": None,
    "device": {"iterations": 0},
    "timings": dict.fromkeys(vars(Timings()))
    | {"import_s": 0.0043, "compile_s": 0.0031, "refer_s": 0.5, "run_s": 0.00477, "fetch_s": 5e-5},
    "cached": ["compile", "refer"],
    "profiles": [],
}


def screen(width=80, **more):
    console = Console(file=io.StringIO(), width=width)
    print_case(console, run_case(**{**CASE, **more}))
    return console.file.getvalue()


def timed(*durations, cold):
    ends = np.cumsum(durations).tolist()
    stamps = tuple(zip([0, *ends], ends, strict=False))
    return summarize_device_times(RunResult("b", {}, stamps, cold=cold)).to_json()


def test_failed_case_with_passing_verdict_shows_reason():
    """The values agree, but not their element types, as iree-run-module compares."""
    same = RunResult("board", {"y": np.ones(2, np.int64)})
    why = "output y: the values agree, but iree-run-module reports a type mismatch"
    verdicts = [record_verdict(compare(same, same)).to_json()]
    assert f"\n  {why}\n" in screen(outcome="FAIL", reason=why, verdicts=verdicts)
    blind = record_verdict(
        compare(RunResult("board", {"y": np.full(2, np.nan)}), RunResult("o", {"y": np.full(2, np.nan)}))
    ).to_json()
    text = " ".join(screen(outcome="BLIND", reason=blind["reason"], verdicts=[blind]).split())
    assert text.count("no number was compared") == 1, "what its verdict says is said once"
    assert "hint try other inputs" in text and "--allow-blind=y accepts" in text


def test_unstable_case_shows_next_step():
    same = RunResult("board", {"y": np.ones(2)})
    repetition = Repetition((Answer(60, 0), Answer(4, 60)), differing=("y", "z z")).record()
    verdicts = [record_verdict(compare(same, same)).to_json()]
    text = " ".join(screen(outcome="UNSTABLE", reason="", verdicts=verdicts, repetition=repetition).split())
    assert "note the tables show the first answer" in text
    assert "hint first difference in iteration 61; use --repeat 5 --fresh-load" in text
    assert "--allow-unstable=y --allow-unstable='z z'" in text
    assert "hint" not in screen(outcome="PASS", verdicts=verdicts, repetition=repetition)


def test_single_iteration_shows_cold_state():
    assert "device time  413 us (1 cold iteration)" in screen(device=timed(413_000, cold=True))
    assert "device time  413 us (1 iteration)" in screen(device=timed(413_000, cold=False))


def test_statistics_exclude_cold_iteration():
    found = timed(9_000_000, 20_000, 30_000, 40_000, cold=True)
    assert (found["iterations"], found["cold_ns"], found["p50_ns"], found["min_ns"]) == (4, 9_000_000, 30_000, 20_000)
    assert found["samples_ns"][0] == 9_000_000
    text = " ".join(screen(200, device=found).split())
    assert "p50 30 us" in text and "(4 iterations; excludes the cold first iteration: 9 ms)" in text
    warm = timed(20_000, 30_000, 40_000, cold=False)
    assert (warm["cold_ns"], warm["p50_ns"]) == (None, 30_000)


@pytest.mark.parametrize("width", range(42, 121))
def test_numbers_and_units_stay_together(width):
    text = screen(width, device=timed(*range(20_000, 40_000, 100), cold=True))
    for line in text.splitlines():
        assert not line.rstrip().endswith(tuple("0123456789")), line
        assert not line.strip().startswith(("ms", "us", "ns", "s,")), line
    assert "\ue000" not in text


def test_report_marks_cached_stage():
    assert "compile 3.1 ms (cached)" in screen(200)
    assert "refer 500 ms (cached)" in screen(200)
    assert "import 4.3 ms," in screen(200)


def test_report_marks_run_without_agent():
    command = {"line": "x", "wall_s": [1.0], "why": "the board has no Python", "not_measured": ["clock"]}
    text = screen(200, provenance={**CASE["provenance"], "command": command})
    assert "on b, without an agent" in text.splitlines()[0]
    assert "no agent     the board has no Python; not measured: clock" in text


def test_hints_and_tool_output_are_not_wrapped():
    hint = "it can be had: hil compile a-model-of-a-long-name.onnx --board root@somewhere -o another-long-name.vmfb"
    detail = "/usr/bin/ld: " + "word " * 40
    error = {"kind": "LoadFailed", "hint": hint, "board": "b", "detail": detail}
    text = screen(60, outcome="LOAD_ERROR", error=error)
    assert hint in text and detail.strip() in text
