"""Measure a small cold test in an open session of the simulator, and the costs of start-up and memory.

In a cold test, a program with unique content is pushed, loaded and run once, and its output is fetched. Start-ups are
whole processes. Memory is the additional peak resident memory of a call with a 100 MB input and a 100 MB output,
divided by 200 MB. This is the number of copies of each tensor, in each process. Shared pages count in every process
that maps them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import common

BIG = 25_000_000
DOUBLE = """
func.func @main(%x: tensor<16xf32>) -> tensor<16xf32> {
  %y = arith.addf %x, %x : tensor<16xf32>
  return %y : tensor<16xf32>
}
"""


def model(path: Path, count: int, constant: float) -> Path:
    """Write the model y = x + constant for ``count`` float32 values."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [count]) for name in "xy"]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [constant])
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "add", values[:1], values[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def cold_tests(rounds: int, runtime: str) -> list[float]:
    """Return the seconds of each push, load, run and fetch."""
    tests = []
    x = np.arange(16, dtype=np.float32)
    with common.session("hil.sim") as (client, _, folder):
        (folder / "double.mlir").write_text(DOUBLE)
        compiled = common.compile_mlir(folder / "double.mlir").read_bytes() if runtime == "iree" else b""
        for turn in range(rounds + 3):
            if runtime == "iree":
                # Do not measure compiling: use one program, and append bytes that make it unique.
                path = folder / f"m{turn}.vmfb"
                path.write_bytes(compiled + turn.to_bytes(8, "little"))
                expected = x + x
            else:
                path = model(folder / f"m{turn}.onnx", 16, float(turn))
                expected = x + turn
            start = time.perf_counter()
            loaded = common.load(client, path, runtime)
            result = client.invoke(loaded.program_id, {"x": x})
            middle = time.perf_counter()
            assert (next(iter(result.outputs.values())) == expected).all()
            client.unload(loaded.program_id)
            if turn >= 3:
                tests.append(middle - start)
            time.sleep(0.05)
    return tests


def process_seconds(rounds: int, *arguments: str) -> list[float]:
    """Return the seconds of whole processes."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - start)
    return taken


def serving_seconds(rounds: int) -> list[float]:
    """Return the seconds from the start of an agent's process to its first reply."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        with common.session():
            taken.append(time.perf_counter() - start)
    return taken


def peak_bytes(pid: int | str, *, reset: bool = False) -> int:
    """Return a process's peak resident memory in bytes. With ``reset``, reset the peak first."""
    folder = Path("/proc") / str(pid)
    if reset:
        (folder / "clear_refs").write_text("5")
    line = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def memory_rows() -> list[common.Row]:
    """Return rows with the copies of a 100 MB tensor in controller, agent and worker."""
    x = np.ones(BIG, np.float32)
    y = np.zeros(BIG, np.float32)
    with common.session() as (client, agent, folder):
        loaded = common.load(client, model(folder / "big.onnx", BIG, 1.0), "onnxruntime")
        processes = {"controller": "self", "agent": agent.pid, "worker": loaded.worker_pid}
        # The controller already has x and y in memory, which count as copies.
        before = {name: peak_bytes(pid, reset=True) for name, pid in processes.items()}
        before["controller"] -= x.nbytes + y.nbytes
        client.invoke(loaded.program_id, {"x": x}, into={"y": y})
        assert (y == 2).all()
        return [
            common.Row(
                f"peak memory, 100 MB in and 100 MB out: {name}",
                (peak_bytes(pid) - before[name]) / 1e6, "MB", "200 MB of tensors", 200.0,
                (peak_bytes(pid) - before[name]) / 200e6, "<= 3.0",
            )
            for name, pid in processes.items()
        ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, rounds=40, starts=5)
    cold = {runtime: cold_tests(asked.rounds, runtime) for runtime in ("iree", "onnxruntime")}
    bare = statistics.median(process_seconds(asked.starts, "-c", "pass"))
    imports = statistics.median(process_seconds(asked.starts, "-c", "import hil"))
    helps = statistics.median(process_seconds(asked.starts, "-m", "hil.controller.cli.main", "--help"))
    serving = statistics.median(serving_seconds(asked.starts))

    def limit(case: str, seconds: float, bar_s: float) -> common.Row:
        return common.Row(case, seconds * 1e3, "ms", "the bar", bar_s * 1e3, seconds / bar_s, "<= 1.0")

    rows = [
        *(
            limit(f"cold test, {runtime}: push + load + run + fetch, p50", statistics.median(tests), 0.010)
            for runtime, tests in cold.items()
        ),
        limit("import hil (less an empty interpreter)", imports - bare, 0.050),
        limit("hil --help", helps, 0.3),
        limit("agent: process start to session open", serving, 1.0),
    ]
    notes = ["copies: of the call's tensors; shared pages count in every process that maps them"]
    if Path("/proc/self/clear_refs").exists():
        rows += memory_rows()
    common.show("cold", rows, notes, as_json=asked.json)


if __name__ == "__main__":
    main()
