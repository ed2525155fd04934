"""Programs for 32-bit integers declare and use int32 where the model has int64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hil.controller.backends.compilers import compile_model
from hil.controller.models.importers import import_model
from hil.core.narrow_integers import NARROW_FLAG
from hil.core.results import Artifact
from hil.core.tensors import TensorSpec
from hil.errors import CompileFailed
from hil.formats.iree_values import choose_function, list_module_functions

Save = Callable[..., Path]
FLAGS = [
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
    NARROW_FLAG,
]
BUILTIN = """
func.func @main(%a: tensor<4xi64>, %b: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xi64>) {
  %0 = arith.addi %a, %a : tensor<4xi64>
  return %b, %0 : tensor<4xf32>, tensor<4xi64>
}
"""
TORCH = """
func.func @main(%a: !torch.vtensor<[4],si64>) -> !torch.vtensor<[4],si64> {
  %0 = torch.aten.mul.Tensor %a, %a : !torch.vtensor<[4],si64>, !torch.vtensor<[4],si64> -> !torch.vtensor<[4],si64>
  return %0 : !torch.vtensor<[4],si64>
}
"""


def build(path: Path, settings: dict[str, Any]) -> Artifact:
    model = import_model(path, isolated=settings["isolated"])
    return compile_model(model, compiler="iree", runtime="iree", flags=FLAGS, debug_ir=None, **settings)


def open_program(artifact: Artifact) -> tuple[list[TensorSpec], list[TensorSpec], Any]:
    """Return the program's inputs and outputs, and the program."""
    from iree import runtime

    config = runtime.Config("local-sync")
    module = runtime.VmModule.copy_buffer(config.vm_instance, artifact.files[artifact.main].read_bytes())
    inputs, outputs = choose_function(list_module_functions(module), artifact.function).make_signature()
    return list(inputs), list(outputs), runtime.load_vm_module(module, config)[artifact.function]


def test_onnx_program_takes_and_returns_int32(save_onnx: Save, settings: dict[str, Any]):
    nodes = [helper.make_node("Mul", ["x", "x"], ["y"], name="square")]
    values = [("x", TensorProto.INT64, ("N",))], [("y", TensorProto.INT64, ("N",))]
    inputs, outputs, call = open_program(build(save_onnx(nodes, *values), settings))
    assert [(one.name, one.dtype) for one in (*inputs, *outputs)] == [("x", "int32"), ("y", "int32")]
    result = call(np.array([3, -4, 46341], np.int32)).to_host()
    assert result.tolist() == [9, 16, 46341**2 - 2**32]  # computed as int32


def test_mlir_program_takes_and_returns_int32(tmp_path: Path, settings: dict[str, Any]):
    (tmp_path / "m.mlir").write_text(BUILTIN)
    inputs, outputs, call = open_program(build(tmp_path / "m.mlir", settings))
    assert [one.dtype for one in (*inputs, *outputs)] == ["int32", "float32", "float32", "int32"]
    _, doubled = call(np.array([1, -2, 3, 4], np.int32), np.ones(4, np.float32))
    assert doubled.to_host().tolist() == [2, -4, 6, 8]


def test_torch_program_takes_and_returns_int32(tmp_path: Path, settings: dict[str, Any]):
    (tmp_path / "m.mlir").write_text(TORCH)
    inputs, outputs, _ = open_program(build(tmp_path / "m.mlir", settings))
    assert [one.dtype for one in (*inputs, *outputs)] == ["int32", "int32"]


@pytest.mark.parametrize("kind", ["!torch.vtensor<[4],ui64>", "!torch.tensor<[4],si64>", "!torch.int"])
def test_other_64_bit_types_are_refused(kind: str):
    from iree.compiler import ir

    from hil.controller.backends.compilers.iree_integers import narrow_functions

    text = f"func.func @main(%a: {kind}) -> {kind} {{ return %a : {kind} }}"
    module = ir.Module.parse(text, context=ir.Context())
    with pytest.raises(CompileFailed, match="hil supports only int64 tensors"):
        narrow_functions(module)


def test_function_that_the_module_calls_is_refused():
    from iree.compiler import ir

    from hil.controller.backends.compilers.iree_integers import narrow_functions

    wide, other = "!torch.vtensor<[4],si64>", "!torch.vtensor<[4],f32>"
    text = f"""
    func.func @inner(%a: {wide}) -> {wide} {{ return %a : {wide} }}
    func.func @outer(%a: {other}) -> {other} {{
      %0 = torch.operator "made"() : () -> {wide}
      %1 = call @inner(%0) : ({wide}) -> {wide}
      return %a : {other}
    }}"""
    module = ir.Module.parse(text, context=ir.Context())
    with pytest.raises(CompileFailed, match="cannot change the int64 inputs and outputs"):
        narrow_functions(module)
