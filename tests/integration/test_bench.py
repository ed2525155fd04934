"""`hil bench` from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from referencing import Registry, Resource
from support.bench_boards import read_samples
from support.models import DIGITS, save_model
from support.slow import slow_except
from support.waiting import eventually

DECODER = Path(__file__).parents[2] / "examples" / "decoder" / "decoder.onnx"
DIGITS_CNN = DIGITS / "digits_cnn.onnx"
DOCS = Path(__file__).parents[2] / "docs"
FLOAT = TensorProto.FLOAT
# For tests without timing assertions.
SHORT = ("--iterations", 40)
SIM_COUNTER = ("--runtime-hw-type", "sim", "--runtime", "onnxruntime", "--fault", "counter")
# Enough to detect a large slowdown on a busy machine.
ENOUGH = ("--iterations", 1000)


@pytest.fixture
def bench(hil) -> Callable[..., Any]:
    """Return a function that runs `hil bench ARGS... --json` and checks document and exit code."""
    schemas = [(path.name, json.loads(path.read_text())) for path in DOCS.glob("*.schema.json")]
    registry = Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in schemas)
    validator = jsonschema.Draft202012Validator({"$ref": "commands.schema.json#/$defs/bench"}, registry=registry)

    def call(*args: object) -> Any:
        ended = hil("bench", *args, "--json")
        document = ended.document
        assert "error" not in document, document
        validator.validate(document)
        assert document["exit_code"] == ended.code
        return document

    return call


@pytest.fixture
def chain(tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that saves a model of N matrix products in sequence."""

    def make(length: int) -> Path:
        nodes = [helper.make_node("MatMul", [f"x{n}", "w"], [f"x{n + 1}"]) for n in range(length)]
        weights = [numpy_helper.from_array(np.eye(128, dtype=np.float32), "w")]
        value = (FLOAT, [128, 128])
        path = tmp_path / f"chain{length}.onnx"
        return save_model(path, nodes, [("x0", *value)], [(f"x{length}", *value)], weights)

    return make


@pytest.mark.daily
def test_bench_measures_model_and_stores_results(bench, hil, tmp_path, simulator):
    document = bench(DIGITS_CNN, "--board", simulator, "--iterations", 300, "--warmup", 5)
    (side,) = document["sides"]
    assert (side["outcome"], side["clock"], side["warmup"]) == ("PASS", "board", 5)
    assert side["times"]["iterations"] == 300
    assert side["times"]["median"]["low"] <= side["times"]["p50_ns"] <= side["times"]["median"]["high"]
    assert all(value is not None for value in side["timings"].values())
    assert side["peak_memory_bytes"] > 1e6
    assert 0 < side["parallelism"] < 2 * (os.cpu_count() or 1)
    folder = tmp_path / document["folder"]
    durations = np.concatenate([batch.duration_ns for batch in read_samples(folder)])
    assert durations.size == 300
    assert np.median(durations) == side["times"]["p50_ns"]
    assert json.loads((folder / "bench.json").read_text()) == document
    shown = hil("runs", "show", "latest", "--json").document
    assert (shown["id"], shown["outcome"]) == (document["id"], "PASS")
    assert shown["cases"][0]["device"]["iterations"] == 300


@pytest.mark.slow
def test_bench_fails_when_second_model_exceeds_slowdown_limit(bench, chain, simulator):
    document = bench(chain(1), chain(40), "--board", simulator, "--fail-if-slower", 10, *ENOUGH)
    found = document["comparison"]
    assert (document["exit_code"], found["verdict"], found["rounds"]) == (1, "slower", 20)
    assert found["interval"]["low"] > 1.5
    assert [side["name"] for side in document["sides"]] == ["A-chain1", "B-chain40"]
    assert [side["loads"] for side in document["sides"]] == [20, 20]


@pytest.mark.slow
def test_bench_repeats_stored_bench_without_model_file(bench, chain, simulator):
    model = chain(1)
    stored = bench(model, "--board", simulator, *SHORT)
    model.unlink()
    document = bench(chain(40), "--against", stored["id"], *ENOUGH)
    a, b = document["sides"]
    assert (a["from_run"], a["outcome"], b["from_run"]) == (stored["id"], "PASS", None)
    assert a["program"]["digests"] == stored["sides"][0]["program"]["digests"]
    assert a["board"] == b["board"] == stored["sides"][0]["board"]
    assert document["comparison"]["verdict"] == "slower"


@pytest.mark.slow  # the guide covers this too
def test_bench_detects_board_slowdown_against_stored_bench(bench):
    stored = bench(DIGITS_CNN, *SHORT)
    document = bench(DIGITS_CNN, "--against", stored["id"], "--fault", "slowdown:factor=5", *ENOUGH)
    assert document["comparison"]["verdict"] == "slower"
    assert document["comparison"]["ratio"] > 2


@pytest.mark.slow
def test_bench_measures_wrong_program_only_without_check(bench, hil):
    shown = hil("bench", DIGITS_CNN, "--runtime-hw-type", "sim-undeclared", *SHORT)
    assert (shown.code, "FAIL" in shown.out, "p50" in shown.out) == (1, True, False)
    document = bench(DIGITS_CNN, "--runtime-hw-type", "sim-undeclared", "--no-check", *SHORT)
    (side,) = document["sides"]
    assert (document["exit_code"], side["outcome"], side["times"]["iterations"]) == (0, "SKIP", 40)


def test_bench_reports_crash_as_outcome(bench):
    document = bench(DIGITS_CNN, "--fault", "crash", *SHORT)
    assert (document["exit_code"], document["sides"][0]["outcome"]) == (3, "RUN_CRASH")
    document = bench(DIGITS_CNN, "--fault", "kill-agent", *SHORT)
    assert (document["exit_code"], document["sides"][0]["outcome"]) == (4, "BOARD_LOST")


@pytest.mark.parametrize(
    ("option", "value", "said"), [("--iterations", 0, "from 1 to 1,000,000"), ("--fault", "quake", "quake")]
)
def test_bench_rejects_invalid_options_without_storing(hil, tmp_path, option, value, said):
    ended = hil("bench", DIGITS_CNN, option, value)
    assert (ended.code, said in ended.err) == (2, True)
    assert not list(tmp_path.glob("hil-runs/*/*"))


def test_bench_does_not_compare_on_throttled_board(bench):
    faults = ("--fault", "pace:seconds=0.001", "--fault", "throttle:after=1.5")
    document = bench(
        DIGITS_CNN, DIGITS_CNN, *faults, "--warmup", 10, "--min-time", 2, "--no-check", "--fail-if-slower", 10
    )
    assert (document["exit_code"], document["comparison"]) == (4, None)
    assert "A-digits_cnn and B-digits_cnn: the board throttled" in document["not_comparable"][0]
    for side in document["sides"]:
        assert side["grade"]["grade"] == "F"
        assert side["conditions"]["events"] == side["grade"]["reasons"]


def test_bench_shows_sustained_times_of_throttled_board(bench):
    faults = ("--fault", "pace:seconds=0.002", "--fault", "throttle:after=2")
    side = bench(DIGITS_CNN, *faults, "--warmup", 10, "--sustained", "4s", "--no-check")["sides"][0]
    found = side["sustained"]
    assert (found["requested_s"], side["grade"]["grade"]) == (4, "F")
    assert found["throttling"]["event"].startswith("the board throttled")
    assert 0 <= found["throttling"]["start_s"] <= 2.5
    assert found["iterations"] == sum(window["iterations"] for window in found["windows"])
    assert found["windows"][-2]["p50_ns"] > 3.5e6


def test_rerun_repeats_stored_bench_and_lists_differences(bench, hil, tmp_path):
    stored = bench(DIGITS_CNN, "--fault", "pace:seconds=0.001", *SHORT)
    path = Path(stored["folder"]) / "bench.json"
    document = hil("rerun", path, "--settle", 0.1, "--json").document
    now = json.loads((tmp_path / document["now"]["folder"] / "bench.json").read_text())
    assert json.loads((tmp_path / document["now"]["folder"] / "rerun.json").read_text()) == document
    assert (document["exit_code"], document["stored"]["id"]) == (0, stored["id"])
    assert [one["times"]["iterations"] for one in (document["stored"], document["now"])] == [40, 40]
    assert now["sides"][0]["program"]["digests"] == stored["sides"][0]["program"]["digests"]
    assert now["sides"][0]["settling"]["steady"] is False
    assert bool(document["comparison"]) == (not document["not_comparable"])
    names = {one["name"] for one in document["differences"]}
    assert names <= {"other load"}


def test_bench_rejects_plain_run_as_baseline(hil, doubling, simulator):
    hil("run", doubling, "--board", simulator)
    ended = hil("bench", doubling, "--against", "latest")
    assert (ended.code, "is not a bench" in ended.err) == (2, True)


def test_bench_prints_measurements_and_verdict(hil, chain, simulator):
    shown = hil("bench", chain(1), chain(40), "--board", simulator, *ENOUGH, "--warmup", 20).out
    for word in ("PASS", "p50", "99%", "outliers", "peak memory", "first run", "slower", "20 rounds", "stored in"):
        assert word in shown


def test_bench_writes_google_benchmark_json(bench, doubling, simulator, tmp_path):
    document = bench(doubling, "--board", simulator, *SHORT, "--benchmark-out", tmp_path / "new/bench.json")
    written = json.loads((tmp_path / "new/bench.json").read_text())
    assert written["context"]["num_cpus"] == os.cpu_count()
    rows = written["benchmarks"]
    assert {row["run_name"] for row in rows} == {"doubling"}
    assert all({"name", "real_time", "cpu_time", "time_unit", "iterations"} <= row.keys() for row in rows)
    times = [row for row in rows if row["run_type"] == "iteration"]
    told = {row["aggregate_name"] for row in rows if row["run_type"] == "aggregate"}
    assert told == {"mean", "median", "stddev", "cv"}
    assert sum(row["iterations"] for row in times) == 40
    total = sum(row["iterations"] * row["real_time"] for row in times)
    assert total / 40 == pytest.approx(document["sides"][0]["times"]["mean_ns"])


@pytest.mark.parametrize("how", slow_except([signal.SIGINT, signal.SIGKILL], 1))
def test_bench_stores_samples_after_interrupt_or_kill(environment, tmp_path, how):
    command = [sys.executable, "-m", "hil.controller.cli.main", "bench", str(DIGITS_CNN), "--min-time", "600", "--json"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    runs = tmp_path / "hil-runs"
    samples = eventually(
        lambda: [path for path in runs.glob("*/samples.csv") if path.read_text().count("\n") > 100], process=process
    )
    folder = samples[0].parent
    process.send_signal(how)
    out, _ = process.communicate(timeout=60)
    kept = sum(batch.duration_ns.size for batch in read_samples(folder))
    assert kept >= 99
    if how == signal.SIGINT:
        assert process.returncode == 130
        document = json.loads(out)
        assert (document["finished"], document["exit_code"]) == (False, 130)
        assert document["sides"][0]["times"]["iterations"] == kept
    else:
        assert json.loads((folder / "bench.json").read_text())["finished"] is False


@pytest.mark.slow
def test_bench_measures_concurrent_programs(bench, tmp_path):
    document = bench(DIGITS_CNN, "--runtime", "onnxruntime", "--concurrency", 3, "--iterations", 150_000)
    (side,) = document["sides"]
    assert (document["concurrency"], side["loads"]) == (3, 3)
    batches = read_samples(tmp_path / document["folder"])
    assert [sum(batch.duration_ns.size for batch in batches if batch.copy == copy) for copy in range(3)] == [
        150_000
    ] * 3
    together = 0
    for first in range(0, len(batches), 3):
        group = batches[first : first + 3]
        ends = [batch.start_ns[-1] + batch.duration_ns[-1] for batch in group]
        together += max(batch.start_ns[0] for batch in group) < min(ends)
    assert together > 0
    assert 0 < side["times"]["iterations"] <= 450_000


@pytest.mark.slow
@pytest.mark.board
def test_bench_measures_board_without_agent(bench, hil, board_x86, tmp_path):
    config = (DOCS.parent / "board_configs" / "command.toml").read_text()
    where = f'[connection]\naddress = "{board_x86.address}"\nidentity = "{board_x86.identity}"\n'
    where += f'known_hosts = "{board_x86.known_hosts}"\nfolder = "bench-by-command"\n'
    (tmp_path / "lab.toml").write_text(f"{config}\n{where}")
    document = bench(DIGITS_CNN, "--board", "lab.toml", "--iterations", 3, "--warmup", 1)
    (side,) = document["sides"]
    assert (side["clock"], side["outcome"], side["times"]["iterations"]) == ("board", "PASS", 3)
    assert side["timings"]["first_run_s"] > 0 and side["peak_memory_bytes"] is None
    tool = board_x86.run(["sh", "-c", "ls /root/bench-by-command/command/programs/*-iree-run-module"]).stdout.strip()
    vendors = config.replace('kind = "command"', f'kind = "command"\nprogram = "{tool}"')
    assert tool in vendors
    (tmp_path / "lab.toml").write_text(f"{vendors}\n{where}")
    (side,) = bench(DIGITS_CNN, "--board", "lab.toml", "--iterations", 3, "--warmup", 1)["sides"]
    assert (side["clock"], side["outcome"], side["times"]["iterations"]) == ("host", "PASS", 3)
    assert side["times"]["min_ns"] > 1e6  # includes the start of a process
    assert (side["peak_memory_bytes"], side["timings"]["first_run_s"]) == (None, None)
    shown = hil("bench", DIGITS_CNN, "--board", "lab.toml", "--iterations", 3, "--warmup", 1)
    assert "each iteration includes a process start" in shown.out


@pytest.mark.slow
@pytest.mark.board
def test_bench_compares_two_runtimes_over_ssh(bench, board_x86):
    where = ("--board", board_x86.address, "--identity", board_x86.identity, "--known-hosts", board_x86.known_hosts)
    stored = bench(DIGITS_CNN, *where, *SHORT)
    document = bench(DIGITS_CNN, "--runtime", "onnxruntime", "--against", stored["id"], *SHORT)
    assert [(side["runtime"], side["outcome"]) for side in document["sides"]] == [
        ("iree", "PASS"),
        ("onnxruntime", "PASS"),
    ]
    assert document["comparison"]["rounds"] == 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_bench_treats_identical_programs_as_equal(bench):
    told = [bench(DIGITS_CNN, DIGITS_CNN)["comparison"]["verdict"] for _ in range(20)]
    assert told == ["no difference"] * 20


@pytest.mark.slow
def test_bench_detects_10_percent_slowdown(bench):
    stored = bench(DIGITS_CNN)
    found = bench(DIGITS_CNN, "--against", stored["id"], "--fault", "slowdown:factor=1.1")["comparison"]
    assert found["verdict"] == "slower"
    # The ratio exceeds the fault's factor: during longer waits the threads of the runtime fall asleep.
    assert 1.03 < found["ratio"] < 1.4


def test_bench_reports_failed_reference_and_measures_program(hil, simulator, tmp_path):
    # ONNX Runtime has no CPU kernel for bfloat16 MatMul; ONNX's reference evaluator has.
    values = [("a", TensorProto.BFLOAT16, [2, 3]), ("b", TensorProto.BFLOAT16, [3, 2])]
    outputs = [("y", TensorProto.BFLOAT16, [2, 2])]
    save_model(tmp_path / "product.onnx", [helper.make_node("MatMul", ["a", "b"], ["y"])], values, outputs)
    named = ["--reference", "onnxruntime", "--reference", "onnx-reference"]
    ended = hil("bench", "product.onnx", "--board", simulator, "--iterations", 20, *named)
    assert ended.code == 0, ended.err
    assert "as onnx reference evaluator" in ended.out and "reference onnxruntime failed" in ended.out


def test_bench_measures_tokens_of_each_prompt(bench, tmp_path: Path):
    spec = tmp_path / "prompts.toml"
    spec.write_text('steps = 2\n[[prompt]]\nname = "p"\ntokens = [84, 104, 101]\n')
    document = bench(DECODER, "--generate", spec, "--runtime", "onnxruntime", "--iterations", 3)
    (side,) = document["sides"]
    assert (side["outcome"], document["prompts"]) == ("PASS", [])
    found = side["generation"]
    assert (found["prompt"], found["prompt_tokens"], found["depths"]) == ("p", 3, [3, 4])
    assert (found["times"]["iterations"], found["times"]["steps"]) == (3, 6)
    assert (tmp_path / document["folder"] / "samples-p.csv").exists()


@pytest.mark.slow
def test_bench_compares_decoders_for_each_prompt(bench, tmp_path: Path):
    spec = tmp_path / "prompts.toml"
    spec.write_text("steps = 2\n[[prompt]]\ntokens = [84, 104, 101]\n[[prompt]]\ntokens = [65]\n")
    document = bench(DECODER, DECODER, "--generate", spec, "--runtime", "onnxruntime", "--iterations", 20)
    assert [side["label"] for side in document["sides"]] == ["A", "A", "B", "B"]
    assert [one["prompt"] for one in document["prompts"]] == ["prompt-1", "prompt-2"]
    assert all(one[name]["rounds"] == 10 for one in document["prompts"] for name in ("prefill", "ttft", "tpot"))


def test_bench_counts_instructions_of_each_iteration(bench, chain, tmp_path):
    document = bench(chain(1), *SIM_COUNTER, *SHORT, "--instructions")
    found, count = document["sides"][0]["instructions"], 1000 * chain(1).stat().st_size
    assert (found["counter"], found["median"], found["min"], found["max"]) == ("simulated", count, count, count)
    samples = (tmp_path / document["folder"] / "samples.csv").read_text().splitlines()
    assert len(samples) == 1 + found["iterations"]
    assert all(line.endswith(f",{count}") for line in samples[1:])


@pytest.mark.slow  # the guide covers a difference
def test_bench_compares_instructions_of_similar_models(bench, chain):
    document = bench(chain(1), chain(2), *SIM_COUNTER, "--iterations", 20, "--instructions")
    one, other = (side["instructions"]["median"] for side in document["sides"])
    assert document["instructions"]["verdict"] == "equal"  # the models differ in a node of 40 bytes
    assert document["instructions"]["ratio"] == other / one > 1


def test_bench_reports_why_the_board_does_not_count(bench, chain):
    document = bench(chain(1), "--runtime-hw-type", "sim", "--runtime", "onnxruntime", *SHORT, "--instructions")
    found = document["sides"][0]["instructions"]
    assert document["exit_code"] == 0
    assert bool(found["problem"]) == (found["median"] is None)


def test_bench_reports_no_times_of_emulated_board(bench, hil, chain, tmp_path):
    (tmp_path / "emulated.toml").write_text("[board]\nicount_shift = 0\n[simulator]\n")
    where = ("--board", tmp_path / "emulated.toml", "--runtime", "onnxruntime")
    document = bench(chain(1), *where, *SHORT)
    (side,) = document["sides"]
    assert (side["clock"], side["times"], side["course_ns"], side["grade"]) == ("icount", None, [], None)
    assert {name: side["timings"][name] for name in ("first_run_s", "warmup_s", "steady_s")} == {
        "first_run_s": None,
        "warmup_s": None,
        "steady_s": None,
    }
    assert side["instructions"]["counter"] == "icount" and side["instructions"]["median"] > 0
    refused = hil("bench", chain(1), *where, "--sustained", "2s")
    assert refused.code == 2 and "needs times, but the clock of board emulated counts instructions" in refused.err
