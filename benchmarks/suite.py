"""Measure a warm suite of 50 layers on a board over SSH, relative to scripts with scp and ssh, and the cost of a case.

- 50 layers of one model, including reports. The rivals copy and run the same programs and inputs one by one, with a
  master connection per test, or with one master connection. All outputs are checked.
- hil's overhead per case on the simulator: the additional time of a suite of 200 cases over a suite of 100 cases,
  without the board's computing time.
- A thousand layers of a generated model with the command `hil suite run`: cases per second if everything is compiled,
  and the command's peak memory.

Run it as `python -m benchmarks.suite`. The first part uses a virtual board, which needs Linux, root, apt-get and
OpenSSH's client.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

from benchmarks import common
from benchmarks.ssh import faster, in_turn, limit
from benchmarks.ssh_layers import WIDTH, make_layers, renew
from benchmarks.ssh_rivals import Rival
from hil.controller.workloads.suites.job import run_suite
from hil.controller.workloads.suites.request import SuiteRequest
from hil.controller.workloads.suites.store import SuiteRun
from tools.virtual_board import VirtualBoard, start

# Layer width in the suite with a thousand layers. The weights have 66 MB.
_NARROW = 32


class Quiet:
    """Progress without output."""

    def begin(self, total: int, done: object) -> None: ...

    def end(self, record: object) -> None: ...

    def note(self, text: str) -> None: ...


def dense_model(path: Path, layers: int, stem: str = "dense", width: int = WIDTH) -> Path:
    """Write a model with layers like the rivals' tests: matrix products of different sizes, in parallel."""
    rng = np.random.default_rng(0)
    nodes, weights, inputs, outputs = [], [], [], []
    for number in range(layers):
        n = width + number
        weights.append(numpy_helper.from_array(rng.integers(-8, 9, (n, width)).astype(np.float32), f"w{number}"))
        nodes.append(helper.make_node("MatMul", [f"x{number}", f"w{number}"], [f"y{number}"], f"fc{number}"))
        inputs.append(helper.make_tensor_value_info(f"x{number}", TensorProto.FLOAT, [1, n]))
        outputs.append(helper.make_tensor_value_info(f"y{number}", TensorProto.FLOAT, [1, width]))
    graph = helper.make_graph(nodes, stem, inputs, outputs, weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path / f"{stem}.onnx")
    return path


def suite(models: Path, out: Path, cases: int, **request: object) -> tuple[float, SuiteRun]:
    """Run the layers of a directory's models. Return the seconds, including reports, and the run."""
    start = time.perf_counter()
    run = run_suite(SuiteRequest(str(models), filters=("*_layer_*",), **request), out=out, screen=Quiet())
    seconds = time.perf_counter() - start
    outcomes = [record.outcome for record in run.read_records()]
    assert outcomes == ["PASS"] * cases, outcomes
    return seconds, run


def board_rows(board: VirtualBoard, folder: Path, tests: int, rounds: int) -> list[common.Row]:
    """Return rows for the suite on a board over SSH, relative to the rivals."""
    (folder / "models").mkdir()
    models = dense_model(folder / "models", tests)
    ssh = {"identity": str(board.identity), "known_hosts": str(board.known_hosts)}
    layers = make_layers(folder / "layers", tests)
    (folder / "rival").mkdir()
    rival = Rival(board, folder / "rival")

    def mine(number: int) -> float:
        return suite(models, folder / f"run{number}", tests, boards=(board.address,), ssh=ssh)[0]

    def way_of(way):
        def measured(number: int) -> float:
            renew(layers, number)
            return way(layers if number else layers[:1])

        return measured

    got = in_turn(
        {"suite": mine, "each": way_of(rival.master_a_test), "kept": way_of(rival.master_kept)},
        rounds,
    )
    case = f"a suite of {tests} layers, reports included"
    return [
        faster(case, got["suite"], "a master a test", got["each"], ">= 30"),
        faster(case, got["suite"], "one master kept", got["kept"], ">= 7"),
    ]


def overhead_rows(folder: Path, rounds: int) -> list[common.Row]:
    """Return rows for the cost of a case on the simulator, for each runtime."""
    rows = []
    for flow in ("iree", "onnxruntime"):
        sizes = {}
        for count in (100, 200):
            place = folder / f"{flow}-{count}"
            place.mkdir()
            sizes[count] = dense_model(place, count)
            suite(place, folder / f"warm-{flow}-{count}", count, flow=flow)
        a_case = []
        for number in range(rounds):
            own = {}
            for count, models in sizes.items():
                seconds, run = suite(models, folder / f"{flow}-{count}-{number}", count, flow=flow)
                own[count] = seconds - sum(record.device_p50_ns or 0 for record in run.read_records()) / 1e9
            a_case.append((own[200] - own[100]) / 100)
        rows.append(limit(f"hil's own time a case, {flow} on the simulator", statistics.median(a_case), 0.003))
    return rows


def many_rows(folder: Path, count: int, rounds: int) -> list[common.Row]:
    """Return rows for ``count`` layers of one model on the simulator, in a separate process."""
    (folder / "many").mkdir()
    models = dense_model(folder / "many", count, width=_NARROW)
    command = [sys.executable, "-m", "hil", "suite", "run", str(models), "--flow", "iree", "--filter", "*_layer_*"]
    seconds, peaks = [], []
    for number in range(1 + rounds):
        out = folder / f"many-{number}"
        start = time.perf_counter()
        ran = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(ran.pid, 0)
        seconds.append(time.perf_counter() - start)
        peaks.append(used.ru_maxrss / 1e3)
        ran.returncode = os.waitstatus_to_exitcode(status)
        outcomes = {record.outcome for record in SuiteRun.open(out).read_records()}
        assert not ran.returncode and outcomes == {"PASS"}, (ran.returncode, outcomes)
    rate = count / statistics.median(seconds[1:])
    return [
        common.Row(f"{count} layers, everything compiled: cases a second", rate, "1/s", bar=">= 150"),
        common.Row(f"{count} layers, compiled first: cases a second", count / seconds[0], "1/s"),
        common.Row(f"{count} layers: the command's peak memory", max(peaks), "MB", bar="<= 600"),
    ]


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, tests=50, rounds=3, overhead=5, layers=1000)
    rows: list[common.Row] = []
    with tempfile.TemporaryDirectory(prefix="hil-bench-") as place:
        folder = Path(place)
        if asked.overhead:
            rows += overhead_rows(folder, asked.overhead)
        if asked.layers:
            rows += many_rows(folder, asked.layers, max(asked.rounds, 1))
        if asked.rounds:
            board = start(folder / "board", name="bench", disk_mb=4096)
            try:
                rows += board_rows(board, folder, asked.tests, asked.rounds)
            finally:
                board.down()
    notes = [
        "a ratio of tests shows how many times faster hil is",
        "the suite's programs and references are in the cache",
    ]
    common.show("suite", rows, notes, as_json=asked.json)


if __name__ == "__main__":
    main()
