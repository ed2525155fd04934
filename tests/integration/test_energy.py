"""The energy of programs on simulated boards with a simulated meter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

METER = """
[board]
name = "metered"
hw_type = "sim"

[simulator]

[meter]
kind = "simulated"
idle_s = 0.6

[meter.options]
idle_w = 2.0
active_w = 5.0
"""
# An iteration takes at least this time.
PACE_S = 0.004
PACED = ("--runtime", "onnxruntime", "--fault", f"pace:seconds={PACE_S}", "--reference", "onnxruntime")


@pytest.fixture
def metered(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the config of a board with a simulated meter, with more options of the meter."""

    def write(more: str = "") -> Path:
        path = tmp_path / "metered.toml"
        path.write_text(METER + more)
        return path

    return write


def check_energy(found: dict) -> None:
    assert found["refused"] is None, found
    assert found["idle_w"] == pytest.approx(2.0, rel=0.02)
    assert found["above_idle_w"] == pytest.approx(3.0, rel=0.02)
    joules = found["per_inference"]["joules"]
    # The window contains the agent's work between the iterations.
    assert joules >= 0.98 * 3.0 * PACE_S
    assert found["per_inference"]["interval"]["low"] <= joules <= found["per_inference"]["interval"]["high"]


def test_bench_measures_energy_and_the_history_stores_it(hil, metered, doubling, tmp_path):
    ended = hil("bench", doubling, "--board", metered(), *PACED, "--iterations", 40, "--energy", "--json")
    assert ended.code == 0
    (side,) = ended.document["sides"]
    check_energy(side["energy"])
    run = Path(tmp_path / ended.document["folder"])
    assert json.loads((run / "bench.json").read_text())["sides"][0]["energy"] == side["energy"]
    assert hil("history", "add", run, "--history", "past").code == 0
    (series,) = hil("history", "ls", "--history", "past", "--json").document["series"]
    (entry,) = hil("history", "show", series["id"], "--history", "past", "--json").document["entries"]
    assert entry["energy"] == side["energy"]


def test_bench_refuses_drifting_idle_power(hil, metered, doubling):
    words = ("bench", doubling, *PACED, "--iterations", 20, "--json")
    refused = hil(*words, "--board", metered("drift_w = 0.3\n"), "--energy")
    assert refused.code == 4
    (side,) = refused.document["sides"]
    assert (side["outcome"], side["energy"]["refused"], side["energy"]["per_inference"]) == ("PASS", "idle drift", None)
    skipped = hil(*words, "--board", metered(), "--no-energy")
    assert (skipped.code, skipped.document["sides"][0]["energy"]) == (0, None)


def test_bench_rejects_energy_without_meter(hil, doubling):
    ended = hil("bench", doubling, "--runtime-hw-type", "sim", "--runtime", "onnxruntime", "--energy")
    assert ended.code == 2
    assert "--energy needs a meter, but the config of board sim has no [meter]" in ended.err


def test_suite_measures_energy_of_each_case(hil, metered, doubling, tmp_path):
    words = ("--no-layers", "--flow", "onnxruntime", "--out", "out", "--energy")
    fault = ("--fault", f"pace:seconds={PACE_S}", "--reference", "onnxruntime")
    assert hil("suite", "run", doubling, "--board", metered(), *words, *fault).code == 0
    (record,) = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    check_energy(record["energy"])
    heads, cells = [line.split(",") for line in (tmp_path / "out" / "results.csv").read_text().splitlines()[:2]]
    assert float(cells[heads.index("joules")]) == pytest.approx(record["energy"]["per_inference"]["joules"])
