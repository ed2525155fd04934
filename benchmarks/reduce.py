"""Measure `hil reduce` on planted faults, relative to `polygraphy debug reduce` with `hil run` as the check.

Models: a MobileNetV2-sized network, an encoder of MiniLM's size (6 layers, 384 channels) and a decoder with 1,000 nodes
and 1 GB of weights. `faulty_runtime/` simulates an ONNX Runtime that computes a weight or a node wrongly, crashes,
hangs or is slow. The compiler crash is real: IREE cannot compile a Reshape of an empty tensor with allowzero.

After each reduction, the script of the bug report runs without hil. The notes show whether it reproduces the failure: a
wrong output, a signal, no end, or the time.

For the rival, pass --polygraphy with the path of `polygraphy` in an environment with onnx, onnxruntime and
onnx-graphsurgeon. Memory is the peak of the total anonymous memory of all processes, without the simulated board.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import common
from benchmarks.model import Builder, mobilenet

_RIVAL = "polygraphy debug reduce"
_SAMPLE_S = 0.2
# Maximum duration of a script that reproduces a failure, and the time that `faulty_runtime` adds.
_STOCK_S, _SLOW_S = 60, 0.3
_FAULTY = Path(__file__).parent / "faulty_runtime"
# Texts in the command lines of the simulator's processes.
_BOARD = (b"hil.sim", b"hil.agent")


@dataclass(frozen=True)
class Plant:
    """A model with a fault.

    Attributes:
        fault: KIND:NAME of the faulty runtime; "" for a real failure.
        options: additional options of hil.
        compared: whether to run the rival too.
    """

    name: str
    model: str
    fault: str
    options: tuple[str, ...] = ()
    compared: bool = True

    @property
    def command(self) -> tuple[str, ...]:
        """Options of hil."""
        return self.options if "--runtime" in self.options else ("--runtime", "onnxruntime", *self.options)

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which ONNX Runtime has the fault."""
        if not self.fault:
            return dict(os.environ)
        paths = [str(_FAULTY), str(Path(__file__).parents[1])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HIL_FAULTY_RUNTIME": self.fault}


PLANTS = (
    Plant("encoder, wrong weight", "encoder", "weight:weight_40"),
    Plant("encoder, wrong operator", "encoder", "operator:Softmax_134"),
    Plant("encoder, crash", "encoder", "crash:Erf_151"),
    Plant("encoder, hang", "encoder", "hang:Softmax_93", ("--timeout", "4")),
    Plant("mobilenet, wrong weight", "mobilenet", "weight:weight_77"),
    Plant("mobilenet, wrong operator", "mobilenet", "operator:GlobalAveragePool"),
    Plant("mobilenet, crash", "mobilenet", "crash:GlobalAveragePool"),
    Plant("decoder, wrong operator", "decoder", "operator:Softmax_739", compared=False),
    Plant("decoder, crash", "decoder", "crash:Sigmoid_274", compared=False),
    Plant("encoder, compiler crash", "crashing", "", ("--runtime", "iree")),
    Plant("encoder, slow layer", "encoder", "slow:Softmax_134", ("--slow", "0.5"), compared=False),
    Plant("mobilenet, slow layer", "mobilenet", "slow:weight_77", ("--slow", "0.5"), compared=False),
)


def main() -> None:
    """Run the reductions and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--polygraphy", default="", help="path of polygraphy")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults with TEXT in their name")
    asked = parser.parse_args()
    rows: list[common.Row] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hil-reduce-") as name:
        folder = Path(name)
        made: dict[str, Path] = {}
        for plant in (one for one in PLANTS if asked.only in one.name):
            if plant.model not in made:
                made[plant.model] = MAKERS[plant.model](folder / f"{plant.model}.onnx")
            *mine, reproduced = reduce_with_hil(plant, made[plant.model], folder)
            notes.append(f"{plant.name}: stock tools {'reproduce' if reproduced else 'do not reproduce'} the failure")
            print(notes[-1], file=sys.stderr, flush=True)
            rival = None
            if asked.polygraphy and plant.compared:
                rival = reduce_with_polygraphy(asked.polygraphy, plant, made[plant.model], folder)
            for number, (what, unit) in enumerate((("nodes", ""), ("runs", ""), ("time", "s"), ("memory", "MiB"))):
                rows.append(
                    common.Row(
                        f"{plant.name}: {what}",
                        mine[number],
                        unit,
                        _RIVAL if rival else "",
                        rival[number] if rival else None,
                        rival[number] and mine[number] / rival[number] if rival else None,
                        {"nodes": "<= 10 nodes", "runs": "<= 64 runs"}.get(what, ""),
                    )
                )
                print(rows[-1], file=sys.stderr, flush=True)
    common.show("reduce", rows, notes, as_json=asked.json)


def reduce_with_hil(plant: Plant, model: Path, folder: Path) -> tuple[float, float, float, float, bool]:
    """Return nodes, runs, seconds, MiB, and whether the script of the report reproduces the failure."""
    command = [
        sys.executable,
        "-m",
        "hil",
        "reduce",
        str(model),
        *plant.command,
        "--out",
        str(folder / "out"),
        "--json",
    ]
    done, seconds, memory = run_measured(command, folder, plant.environment)
    found = json.loads(done.stdout)
    if "nodes_after" not in found:
        raise SystemExit(f"{plant.name}: {done.stderr}")
    return found["nodes_after"], len(found["trials"]), seconds, memory, run_stock(plant, found)


def run_stock(plant: Plant, found: Mapping[str, Any]) -> bool:
    """Run the script of a bug report. Return whether it reproduces the failure."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(
        shlex.split(found["stock"]),
        cwd=found["folder"],
        env={**plant.environment, "PATH": tools},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as script:
        try:
            printed, _ = script.communicate(timeout=_STOCK_S)
        except subprocess.TimeoutExpired:
            os.killpg(script.pid, signal.SIGKILL)
            return plant.fault.startswith("hang")
    if plant.fault.startswith("slow"):
        shortest = re.match(r"shortest (\S+) ms", printed)
        return shortest is not None and float(shortest[1]) >= 1e3 * _SLOW_S
    crashes = plant.fault.startswith("crash") or not plant.fault
    return script.returncode < 0 or script.returncode > 128 if crashes else script.returncode == 1


def reduce_with_polygraphy(tool: str, plant: Plant, model: Path, folder: Path) -> tuple[float, float, float, float]:
    """Return nodes, runs, seconds and MiB.

    The check is `hil run` with the same options; an exit code other than 0 is a failure.
    """
    output = folder / "reduced.onnx"
    output.unlink(missing_ok=True)
    # Only the check uses the faulty runtime, because polygraphy also uses ONNX Runtime.
    names = ("PYTHONPATH", "HIL_FAULTY_RUNTIME")
    check = ["env", *(f"{name}={plant.environment[name]}" for name in names if name in plant.environment)]
    check += [
        sys.executable,
        "-m",
        "hil",
        "run",
        "polygraphy_debug.onnx",
        *plant.command,
        "--out",
        str(folder / "runs"),
    ]
    command = [tool, "debug", "reduce", str(model), "-o", str(output), "--mode", "bisect", "--check", *check]
    done, seconds, memory = run_measured(command, folder, os.environ)
    runs = done.stdout.count("RUNNING | Iteration")
    nodes = len(onnx.load(output).graph.node) if output.exists() else 0
    return nodes, runs, seconds, memory


def run_measured(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """Run a command. Return the completed process, the seconds, and the peak memory of its processes in MiB."""
    start, peak, ended = time.monotonic(), [0.0], threading.Event()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def sample() -> None:
        while not ended.wait(_SAMPLE_S):
            peak[0] = max(peak[0], memory_of(process.pid))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    out, err = process.communicate()
    ended.set()
    sampler.join()
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    return done, time.monotonic() - start, peak[0]


def memory_of(root: int) -> float:
    """Return the anonymous memory of a process and its descendants in MiB, without simulated boards."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    total, pending = 0, [root]
    while pending:
        one = pending.pop()
        try:
            if any(text in Path(f"/proc/{one}/cmdline").read_bytes() for text in _BOARD):
                continue
            status = Path(f"/proc/{one}/status").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        pending += children.get(one, [])
    return total / 1024


class Network(Builder):
    """Builder with named nodes and transformer layers."""

    def node(self, op: str, inputs: list[str], **attributes: object) -> str:
        """Add a node; returns its output's name."""
        name = super().node(op, inputs, **attributes)
        self.nodes[-1].name = f"{op}_{len(self.nodes) - 1}"
        return name

    def add_weight(self, array: np.ndarray) -> str:
        """Add a weight. Return its name, which is too long to occur in random weights."""
        super().add_weight(array)
        self.weights[-1].name = f"weight_{len(self.weights) - 1}"
        return self.weights[-1].name

    def dense(self, x: str, into: int, out: int) -> str:
        """Add a product with a seeded weight."""
        values = self._rng.standard_normal((into, out), dtype=np.float32) * np.float32(into**-0.5)
        return self.node("MatMul", [x, self.add_weight(values)])

    def attention(self, x: str, length: int, width: int, heads: int) -> str:
        """Add multi-head attention."""
        split = self.add_weight(np.array([length, heads, width // heads], np.int64))
        merge = self.add_weight(np.array([length, width], np.int64))
        q, k, v = (self.node("Reshape", [self.dense(x, width, width), split]) for _ in range(3))
        q, v = (self.node("Transpose", [one], perm=[1, 0, 2]) for one in (q, v))
        scores = self.node("MatMul", [q, self.node("Transpose", [k], perm=[1, 2, 0])])
        scores = self.node("Mul", [scores, self.add_weight(np.float32((width // heads) ** -0.5))])
        found = self.node("MatMul", [self.node("Softmax", [scores]), v])
        return self.dense(self.node("Reshape", [self.node("Transpose", [found], perm=[1, 0, 2]), merge]), width, width)

    def normalised(self, x: str, width: int) -> str:
        """Add a layer normalisation as a sequence of basic operators, like exporters."""
        centred = self.node("Sub", [x, self.node("ReduceMean", [x], axes=[-1])])
        variance = self.node("ReduceMean", [self.node("Mul", [centred, centred])], axes=[-1])
        scale = self.node("Sqrt", [self.node("Add", [variance, self.add_weight(np.float32(1e-5))])])
        return self.node("Mul", [self.node("Div", [centred, scale]), self.add_weight(np.ones(width, np.float32))])

    def save(self, path: Path, length: int, width: int, x: str, *, external: bool = False) -> Path:
        """Write the model. The input is x, the output is the last value, float32."""
        value = (TensorProto.FLOAT, [length, width])
        given, made = (helper.make_tensor_value_info(name, *value) for name in ("x", x))
        graph = helper.make_graph(self.nodes, path.stem, [given], [made], self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.save(model, path, save_as_external_data=external, location=f"{path.name}.data", size_threshold=4096)
        return path


def encoder(path: Path, *, crashing: bool = False) -> Path:
    """Write an encoder like MiniLM: 6 layers, 384 channels, 12 heads, 64 tokens."""
    build, x = Network(), "x"
    length, width = 64, 384
    for layer in range(2 if crashing else 6):
        x = build.normalised(build.node("Add", [x, build.attention(x, length, width, 12)]), width)
        y = build.dense(x, width, 4 * width)
        half = build.node("Mul", [y, build.add_weight(np.float32(0.5))])
        erf = build.node("Erf", [build.node("Div", [y, build.add_weight(np.float32(2**0.5))])])
        y = build.node("Mul", [half, build.node("Add", [erf, build.add_weight(np.float32(1))])])
        x = build.normalised(build.node("Add", [x, build.dense(y, 4 * width, width)]), width)
        if crashing and layer == 0:
            none, shape = (build.add_weight(np.array(one, np.int64)) for one in ([0], [width, length, 0]))
            empty = build.node("Reshape", [build.node("Slice", [x, none, none]), shape], allowzero=1)
            x = build.node("Add", [x, build.node("ReduceSum", [empty], keepdims=0)])
    return build.save(path, length, width, x)


def crashing_encoder(path: Path) -> Path:
    """Write an encoder that IREE cannot compile."""
    return encoder(path, crashing=True)


def decoder(path: Path) -> Path:
    """Write a decoder with about 1,000 nodes and 1 GB of weights: 26 layers, 896 channels, 8 tokens."""
    build, x = Network(), "x"
    length, width, inner = 8, 896, 2432
    for _ in range(26):
        x = build.node("Add", [x, build.attention(build.normalised(x, width), length, width, 14)])
        y = build.normalised(x, width)
        gate = build.dense(y, width, inner)
        gate = build.node("Mul", [gate, build.node("Sigmoid", [gate])])
        x = build.node("Add", [x, build.dense(build.node("Mul", [gate, build.dense(y, width, inner)]), inner, width)])
    return build.save(path, length, width, x, external=True)


def named_mobilenet(path: Path) -> Path:
    """Write a network like MobileNetV2, with weight names as in :class:`Network`."""
    model = onnx.load(mobilenet(path))
    names = {tensor.name: f"weight_{number}" for number, tensor in enumerate(model.graph.initializer)}
    for tensor in model.graph.initializer:
        tensor.name = names[tensor.name]
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    onnx.save(model, path)
    return path


MAKERS: dict[str, Callable[[Path], Path]] = {
    "encoder": encoder,
    "crashing": crashing_encoder,
    "mobilenet": named_mobilenet,
    "decoder": decoder,
}

if __name__ == "__main__":
    main()
