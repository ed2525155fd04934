"""Measure the cost of hil's checks: comparing the outputs of all iterations, and checking rewrites of a model.

The outputs of a convolution with 64 channels (64 KB, 1 MB and 16 MB) are compared with the code of the agent's worker.
The time is relative to the device time of an iteration. The MobileNetV2-sized model is measured in the same way. A
rewrite (inlining a local function) is checked in a warm worker process, without a cache and from the cache. The time is
relative to compiling the same model without a cache.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks import common
from benchmarks.compile_layers import TARGET
from benchmarks.model import DEVICE, mobilenet
from hil.agent.ipc import Arena
from hil.agent.iterations import AnswerLog
from hil.controller.backends.compilers import compile_model
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.models.importers import import_model
from hil.controller.models.onnx_files.rewrite_check import check_rewrites
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.tensors import Array

CHANNELS = 64
# Height and width of the output -> its size.
SIDES = {16: "64 KB", 64: "1 MB", 256: "16 MB"}
TIMEOUT_S = 600.0


def convolution(path: Path, side: int) -> Path:
    """Write a model with a 3x3 convolution. Input and output are 1x64xSIDExSIDE float32."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((CHANNELS, CHANNELS, 3, 3), dtype=np.float32), "w")
    shape = [1, CHANNELS, side, side]
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    graph = helper.make_graph([node], "convolution", [given], [made], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def with_function(path: Path) -> Path:
    """Write the MobileNetV2-sized model with a local function at the end, which must be inlined for IREE's importer."""
    model = onnx.load(mobilenet(path))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    node = helper.make_node("Mul", ["a", "a"], ["b"])
    model.functions.append(helper.make_function("local", "Square", ["a"], ["b"], [node], opsets[:1]))
    model.graph.node.append(helper.make_node("Square", ["scores"], ["squares"], domain="local"))
    model.graph.output[0].name = "squares"
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    onnx.save(model, path)
    return path


def compare_answers(answer: Array, runs: int) -> list[float]:
    """Return the seconds for comparing the outputs of each further run."""
    log = AnswerLog(Arena(), ["y"], runs + 2)
    log.add([answer])
    others = itertools.cycle([answer.copy() for _ in range(4)])
    return common.timed(lambda: log.add([next(others)]), runs)


def measure_answers(folder: Path, rounds: int, calls: int) -> list[common.Row]:
    """Return a row for each model: comparing outputs, relative to the device time of an iteration."""
    models = {
        f"a 3x3 convolution, {size} out": convolution(folder / f"{side}.onnx", side) for side, size in SIDES.items()
    }
    models["MobileNetV2-sized, 4 KB out"] = mobilenet(folder / "mobilenet.onnx")
    with common.session() as (client, _, _):
        return [measure_model(client, name, path, rounds, calls) for name, path in models.items()]


def measure_model(client: AgentClient, name: str, path: Path, rounds: int, calls: int) -> common.Row:
    """Compile a model, measure it, and return the row."""
    program = path.with_suffix(".vmfb")
    call = ["compile", str(path), "--runtime-hw-type", "sim", "-o", str(program)]
    subprocess.run([sys.executable, "-m", "hil.controller.cli.main", *call], check=True, stdout=sys.stderr)
    loaded = common.load(client, program, device=DEVICE)
    (given,) = loaded.inputs
    x = np.random.default_rng(1).random([size for size in given.shape if isinstance(size, int)], dtype=np.float32)
    answer = next(iter(client.invoke(loaded.program_id, {given.name: x}).outputs.values()))

    def iterations() -> list[float]:
        done = client.invoke(loaded.program_id, {given.name: x}, iterations=calls)
        return [(end - start) / 1e9 for start, end in done.iterations_ns]

    got = common.interleave({"compare": lambda: compare_answers(answer, calls), "device": iterations}, rounds)
    case = f"comparing an answer, {name}"
    return common.beside(case, got["compare"], "the iteration", got["device"], 1e6, "us", "<= 0.02")


def measure_rewrites(folder: Path, rounds: int) -> list[common.Row]:
    """Return rows for the check of a rewrite: without the cache, relative to compiling, and from the cache."""
    path = with_function(folder / "function.onnx")
    x = np.random.default_rng(1).random((1, 3, 224, 224), dtype=np.float32)
    with Isolated(1) as isolated:
        model = import_model(path, isolated=isolated)
        numbers = itertools.count()

        def work(cache: Cache) -> dict[str, Any]:
            log = folder / "work.log"
            return {"cache": cache, "isolated": isolated, "recompute": False, "timeout": TIMEOUT_S, "log": log}

        def empty() -> Cache:
            return Cache(folder / f"cache{next(numbers)}")

        def check(cache: Cache) -> Callable[[], object]:
            return lambda: check_rewrites(model, {"image": x}, **work(cache))

        def compiled() -> object:
            order: dict[str, Any] = {"debug_ir": None, "debug_ir_passes": False, "failure": None, **work(empty())}
            return compile_model(model, compiler="iree", runtime="iree", flags=TARGET, **order)

        kept = Cache(folder / "kept")
        cases: dict[str, Callable[[], list[float]]] = {
            "check": lambda: common.timed(check(empty()), 1),
            "compile": lambda: common.timed(compiled, 1),
            "again": lambda: common.timed(check(kept), 5),
        }
        got = common.interleave(cases, rounds)
    case = "checking a rewrite of a MobileNetV2-sized model"
    return [
        common.beside(case, got["check"], "compiling it", got["compile"], 1e3, "ms", ""),
        common.beside(f"{case}, from the cache", got["again"], "compiling it", got["compile"], 1e3, "ms", "<= 0.01"),
    ]


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, rounds=9, calls=20)
    with common.session() as (_, _, folder):
        rows = measure_answers(folder, asked.rounds, asked.calls)
        rows += measure_rewrites(folder, max(asked.rounds // 3, 1))
    notes = ["each figure is the median over rounds of a round's median; samples of answers above 1 MB are compared"]
    common.show("checks", rows, notes, as_json=asked.json)


if __name__ == "__main__":
    main()
