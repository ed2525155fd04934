"""In every runtime, each run of a program starts from the given inputs and from the state after loading."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.agents import compile_for_device, compile_mlir
from support.tflite_models import save_dynamic_update
from support.vulkan import NO_VULKAN, has_vulkan

from hil.agent.forkserver import _ForkedWorker
from hil.agent.ipc import Arena, lay_out
from hil.core.runtimes import RUNTIMES
from hil.core.tensors import Array, from_bytes
from hil.formats.iree_devices import find_device

# Adds to a row of its first input; IREE updates the input's memory in place.
UPDATE = """
func.func @main(%cache: tensor<{rows}x64xf32>, %x: tensor<1x64xf32>, %at: tensor<i32>) -> tensor<{rows}x64xf32> {{
  %zero = arith.constant dense<0> : tensor<i32>
  %old = stablehlo.dynamic_slice %cache, %at, %zero, sizes = [1, 64]
    : (tensor<{rows}x64xf32>, tensor<i32>, tensor<i32>) -> tensor<1x64xf32>
  %new = stablehlo.add %old, %x : tensor<1x64xf32>
  %y = stablehlo.dynamic_update_slice %cache, %new, %at, %zero
    : (tensor<{rows}x64xf32>, tensor<1x64xf32>, tensor<i32>, tensor<i32>) -> tensor<{rows}x64xf32>
  return %y : tensor<{rows}x64xf32>
}}
"""
# Adds its input to state that persists between calls.
SUM = """
util.global private mutable @sum = dense<0.0> : tensor<4xf32>
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %old = util.global.load @sum : tensor<4xf32>
  %new = arith.addf %old, %x : tensor<4xf32>
  util.global.store %new, @sum : tensor<4xf32>
  return %new : tensor<4xf32>
}
"""


class Loaded:
    """A program in a worker of this process."""

    def __init__(self, runtime: str, path: Path, device: str = "") -> None:
        self._in, self._out = Arena(), Arena()
        self._worker = _ForkedWorker(self._in, self._out)
        order = {"options": {}, "runtime": RUNTIMES[runtime].agent, "device": device, "instructions": False}
        self._worker.do_prepare(order)
        order = {"folder": str(path.parent), "main": path.name, "device": device, "function": ""}
        self.names = [one["name"] for one in self._worker.do_load(order)["inputs"]]

    def run(self, inputs: Sequence[Array], warmup: int = 1, iterations: int = 4) -> tuple[list[Array], dict[str, Any]]:
        """Return the first run's outputs, and the worker's report about all runs."""
        entries, size = lay_out(self._in, zip(self.names, inputs, strict=True))
        order = {"inputs": entries, "bytes": size, "warmup": warmup, "iterations": iterations}
        found = self._worker.do_invoke(order)
        assert len(self._worker.numbers) == 3 + 2 * iterations
        ends = [one["at"] + one["bytes"] for one in found["outputs"]]
        view = self._out.view(max(ends), grow=False)
        arrays = [
            from_bytes(view[one["at"] : end], one["dtype"], one["shape"])
            for one, end in zip(found["outputs"], ends, strict=True)
        ]
        return [array.copy() for array in arrays], found


def cache(rows: int) -> tuple[list[Array], Array]:
    """Return inputs of UPDATE, and the expected output."""
    kept, x = np.arange(rows * 64, dtype=np.float32).reshape(rows, 64), np.full((1, 64), 5, np.float32)
    right = kept.copy()
    right[2] += 5
    return [kept, x, np.array(2, np.int32)], right


def iree_update(rows: int) -> Callable[[Path], tuple[Path, list[Array], Array]]:
    def build(folder: Path) -> tuple[Path, list[Array], Array]:
        (folder / "update.mlir").write_text(UPDATE.format(rows=rows))
        return compile_mlir(folder / "update.mlir", platform.machine(), folder / "update.vmfb").path, *cache(rows)

    return build


def vulkan_update(folder: Path) -> tuple[Path, list[Array], Array]:
    from hil.agent.runtimes.iree import IreeRuntime

    (folder / "update.mlir").write_text(UPDATE.format(rows=8))
    details = find_device([{"name": "iree", **IreeRuntime.describe()}], "iree", "vulkan")
    assert details is not None
    program = compile_for_device(folder / "update.mlir", "vulkan", details, folder / "update.vmfb")
    return program.path, *cache(8)


def onnx_update(folder: Path) -> tuple[Path, list[Array], Array]:
    def value(name: str, dtype: int, shape: list[int]) -> Any:
        return helper.make_tensor_value_info(name, dtype, shape)

    node = helper.make_node("ScatterND", ["kv", "at", "x"], ["y"], reduction="add")
    inputs = [value("kv", 1, [8, 64]), value("x", 1, [1, 64]), value("at", TensorProto.INT64, [1, 1])]
    graph = helper.make_graph([node], "update", inputs, [value("y", 1, [8, 64])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "m.onnx")
    (kept, x, _), right = cache(8)
    return folder / "m.onnx", [kept, x, np.array([[2]], np.int64)], right


def tflite_update(folder: Path) -> tuple[Path, list[Array], Array]:
    kept, x = np.arange(24, dtype=np.float32).reshape(6, 4), np.full((1, 4), 5, np.float32)
    right = kept.copy()
    right[2] = 5
    return (
        save_dynamic_update(folder / "update.tflite", kept.shape, x.shape),
        [kept, x, np.array([2, 0], np.int32)],
        right,
    )


@pytest.mark.parametrize(
    ("runtime", "device", "build"),
    [
        pytest.param("iree", "local-sync", iree_update(8), id="iree-copied"),
        pytest.param("iree", "local-sync", iree_update(1024), id="iree-shared"),
        pytest.param(
            *("iree", "vulkan", vulkan_update),
            id="iree-vulkan",
            marks=[pytest.mark.slow, pytest.mark.skipif(not has_vulkan(), reason=NO_VULKAN)],
        ),
        pytest.param("onnxruntime", "", onnx_update, id="onnxruntime"),
        pytest.param("tflite", "xnnpack", tflite_update, id="tflite-xnnpack"),
        pytest.param("tflite", "builtin", tflite_update, id="tflite-builtin"),
    ],
)
def test_runtime_gives_every_run_the_original_inputs(
    runtime: str, device: str, build: Callable[[Path], tuple[Path, list[Array], Array]], tmp_path: Path
):
    path, inputs, right = build(tmp_path)
    loaded = Loaded(runtime, path, device)
    for number, (warmup, iterations) in enumerate([(1, 4), (0, 1), (0, 3)]):
        given = [inputs[0] + number, *inputs[1:]]
        (found,), told = loaded.run(given, warmup, iterations)
        wanted = right + number
        if runtime == "tflite":
            wanted[2] = right[2]
        np.testing.assert_array_equal(found, wanted)
        assert [runs for runs, *_ in told.get("answers", [[1]])] == [warmup + iterations]


def test_runtime_starts_every_run_from_state_after_load(tmp_path: Path):
    (tmp_path / "sum.mlir").write_text(SUM)
    program = compile_mlir(tmp_path / "sum.mlir", platform.machine(), tmp_path / "sum.vmfb")
    loaded = Loaded("iree", program.path, "local-sync")
    for value, (warmup, iterations) in ((1, (2, 3)), (5, (0, 1)), (7, (0, 2))):
        (found,), told = loaded.run([np.full(4, value, np.float32)], warmup, iterations)
        assert found.tolist() == [value] * 4
        assert len(told.get("answers", [1])) == 1


def test_runtime_counts_differing_outputs_of_all_runs(tmp_path: Path):
    node = helper.make_node("RandomUniform", [], ["r"], shape=[4])
    outputs = [helper.make_tensor_value_info("y", 1, [4])]
    inputs = [helper.make_tensor_value_info("x", 1, [4])]
    graph = helper.make_graph([node, helper.make_node("Add", ["x", "r"], ["y"])], "random", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "r.onnx")
    _, told = Loaded("onnxruntime", tmp_path / "r.onnx").run([np.zeros(4, np.float32)], 3, 5)
    assert [(runs, first) for runs, first, _ in told["answers"]] == [(1, number) for number in range(8)]
    assert told["differing"] == [0]
