"""Compile 50 models with one layer each, from ONNX files to programs in an empty cache, and compare with iree-compile.

The layers are convolutions, matrix products, poolings, activations and normalisations of different shapes. hil's time
includes everything: starting worker processes, reading the models, compiling them together, and requesting each
program. The rivals are `iree-import-onnx` and `iree-compile` from pip, in sequence; the compiler's native binary on
imported files, in sequence; and the same with a process per core. All compile for the same target. Each program of hil
must give the same output as the rival's program, bit by bit.

`--layers N` uses N of the layers. A round takes two minutes on a quiet machine. There is no warm-up round.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from iree import runtime
from onnx import TensorProto, helper, numpy_helper

from benchmarks import common
from hil.controller.backends.compilers import compile_model
from hil.controller.backends.compilers.iree_group import compile_together
from hil.controller.models.compiling import find_native_compiler
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.boards import load_board
from hil.core.results import Artifact, Model

TIMEOUT_S = 600.0
TARGET = load_board("sim").config.compile_flags["iree"]
CORES = os.cpu_count() or 1

# Operator, input shape, weight shapes, attributes.
Layer = tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...], dict[str, Any]]


def layers() -> Iterator[Layer]:
    """Yield 50 layers."""
    for n in range(10):
        inner, outer, side, kernel = 8 + 4 * n, 16 + 8 * (n % 5), 28 - 2 * n, 1 + 2 * (n % 3)
        settings = {"pads": [kernel // 2] * 4, "strides": [1 + n % 2] * 2}
        yield "Conv", (1, inner, side, side), ((outer, inner, kernel, kernel), (outer,)), settings
    for n in range(1, 6):
        yield "Conv", (1, 8 * n, 20, 20), ((8 * n, 1, 3, 3),), {"group": 8 * n, "pads": [1] * 4}
    for n in range(8):
        yield "MatMul", (4 + n, 32 + 16 * n), ((32 + 16 * n, 24 + 8 * n),), {}
    for n in range(4):
        yield "Gemm", (2, 40 + 20 * n), ((10 + n, 40 + 20 * n), (10 + n,)), {"transB": 1}
    for n in range(8):
        op = ("MaxPool", "AveragePool")[n % 2]
        yield op, (1, 8 + 4 * n, 16, 16), (), {"kernel_shape": [2 + n // 4] * 2, "strides": [2, 2]}
    for n, op in enumerate(("Relu", "Sigmoid", "Tanh", "HardSwish", "Elu", "Erf")):
        yield op, (1, 24, 14, 10 + n), (), {}
    for n in range(3):
        yield "Softmax", (4, 50 + 25 * n), (), {"axis": -1}
        yield "LayerNormalization", (4, 32 + 16 * n), ((32 + 16 * n,),) * 2, {}
        yield "Add", (1, 16 + n, 12, 12), ((1, 16 + n, 1, 1),), {}


def save(folder: Path, number: int, layer: Layer) -> Path:
    """Write a model with one layer and seeded random weights. Return the path."""
    op, shape, sizes, attributes = layer
    rng = np.random.default_rng(number)
    weights = [
        numpy_helper.from_array(rng.uniform(0.1, 1, size).astype(np.float32), f"w{at}") for at, size in enumerate(sizes)
    ]
    name = f"{op.lower()}_{number}"
    graph = helper.make_graph(
        [helper.make_node(op, ["x", *(weight.name for weight in weights)], ["y"], name=name, **attributes)],
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = folder / f"{name}.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


def by_hil(paths: Sequence[Path], folder: Path) -> list[Artifact]:
    """Compile the models with hil and an empty cache."""
    cache = Cache(folder / "cache")
    with Isolated() as isolated, ThreadPoolExecutor(isolated.workers) as pool:
        shared: dict[str, Any] = {"flags": TARGET, "cache": cache, "isolated": isolated, "timeout": TIMEOUT_S}
        models = list(pool.map(lambda path: import_model(path, isolated=isolated, cache=cache), paths))
        result = compile_together(models, log_folder=folder / "logs", **shared)

        def program(model: Model) -> Artifact:
            more = {"compiler": "iree", "runtime": "iree", "recompute": False, "debug_ir": None}
            return compile_model(model, log=folder / "logs" / f"{model.name}.log", **shared, **more)

        artifacts = list(pool.map(program, models))
    assert result.programs and all(artifact.cached for artifact in artifacts)
    return artifacts


def by_commands(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Compile the models in sequence, with the commands from pip."""
    commands = Path(sys.executable).parent
    made = []
    for path in paths:
        imported, program = (folder / f"{path.stem}{suffix}" for suffix in (".mlir", ".vmfb"))
        subprocess.run([str(commands / "iree-import-onnx"), str(path), "-o", str(imported)], check=True)
        subprocess.run([str(commands / "iree-compile"), str(imported), "-o", str(program), *TARGET], check=True)
        made.append(program)
    return made


def by_compiler(paths: Sequence[Path], folder: Path, at_once: int) -> list[Path]:
    """Compile imported files with the native compiler."""

    def one(path: Path) -> Path:
        program = folder / f"{path.stem}.vmfb"
        subprocess.run([str(find_native_compiler()), str(path), "-o", str(program), *TARGET], check=True)
        return program

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, paths))


def check(artifacts: Sequence[Artifact], rivals: Sequence[Path], made: Sequence[Layer]) -> None:
    """Run the programs of hil and of a rival with the same inputs, and check that the outputs are equal."""
    config = runtime.Config("local-sync")
    for artifact, rival, layer in zip(artifacts, rivals, made, strict=True):
        x = np.random.default_rng(0).normal(size=layer[1]).astype(np.float32)
        outputs = []
        for path, function in ((artifact.files[artifact.main], artifact.function), (rival, rival.stem)):
            module = runtime.load_vm_module(runtime.VmModule.mmap(config.vm_instance, str(path)), config)
            outputs.append(module[function](x).to_host())
        np.testing.assert_array_equal(*outputs)


def timed(work: Callable[[], Any], seconds: list[float], cpu: list[float]) -> Any:
    """Call a function. Record its seconds, and the CPU seconds of the processes that it started. Return its result."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    made = work()
    seconds.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return made


def one_round(
    chosen: Sequence[Layer],
    rivals: Sequence[str],
    folder: Path,
    seconds: dict[str, list[float]],
    cpu: dict[str, list[float]],
) -> int:
    """Compile with hil and all rivals, and check the programs. Return the number of hil's files."""
    paths = [save(folder, number, layer) for number, layer in enumerate(chosen)]
    imported = [path.with_suffix(".mlir") for path in paths]
    by_command, alone, at_once = rivals
    artifacts = timed(lambda: by_hil(paths, folder), seconds["hil"], cpu["hil"])
    programs = timed(lambda: by_commands(paths, folder), seconds[by_command], cpu[by_command])
    check(artifacts, programs, chosen)
    timed(lambda: by_compiler(imported, folder, 1), seconds[alone], cpu[alone])
    timed(lambda: by_compiler(imported, folder, CORES), seconds[at_once], cpu[at_once])
    return len({artifact.digests[artifact.main] for artifact in artifacts})


def main() -> None:
    """Print the table, or one JSON document with ``--json``."""
    options = common.options(__doc__, rounds=1, layers=50)
    chosen = list(layers())[: options.layers]
    rivals = {
        "iree-import-onnx + iree-compile": "<= 0.10",
        "native iree-compile, imported before": "<= 0.20",
        f"{CORES} of those at once": "<= 0.67",
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("hil", *rivals)}
    cpu: dict[str, list[float]] = {name: [] for name in ("hil", *rivals)}
    files = 0
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            files = one_round(chosen, list(rivals), Path(scratch), seconds, cpu)
    case = f"{len(chosen)} models of one layer compiled"
    rows = [common.beside(case, seconds["hil"], name, seconds[name], 1.0, "s", bar) for name, bar in rivals.items()]
    rows += [common.beside("its CPU time", cpu["hil"], name, cpu[name], 1.0, "s", "") for name in rivals]
    notes = [f"hil wrote {files} files; every output is bit-identical to the rival's"]
    common.show("compile_layers", rows, notes, as_json=options.json)


if __name__ == "__main__":
    main()
