"""Parts of MLIR modules: which values become inputs, and what stays in the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hil.controller.models.importers.mlir import describe
from hil.controller.workloads.reduce.candidates.mlir_parts import (
    MLIR_MODEL,
    print_mlir,
    write_mlir_base,
    write_mlir_part,
)
from hil.errors import ImportFailed

LINALG = """
#id = affine_map<(i, j) -> (i, j)>
util.global private @weights = dense<0.5> : tensor<4x4xf32>
func.func private @helper(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %r = math.tanh %x : tensor<4x4xf32>
  return %r : tensor<4x4xf32>
}
func.func @forward(%a: tensor<4x4xf32> {iree.abi.name = "x"}, %n: i32) -> (tensor<4x4xf32>, tensor<?xf32>) {
  %one = arith.constant 1.0 : f32
  %w = util.global.load @weights : tensor<4x4xf32>
  %e = tensor.empty() : tensor<4x4xf32>
  %zero = linalg.fill ins(%one : f32) outs(%e : tensor<4x4xf32>) -> tensor<4x4xf32>
  %dot = linalg.matmul ins(%a, %w : tensor<4x4xf32>, tensor<4x4xf32>) outs(%zero : tensor<4x4xf32>) -> tensor<4x4xf32>
  %p = func.call @helper(%dot) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %i = arith.sitofp %n : i32 to f32
  %sum = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
    ins(%p : tensor<4x4xf32>) outs(%e : tensor<4x4xf32>) {
  ^bb0(%x: f32, %y: f32):
    %z = arith.addf %x, %i : f32
    linalg.yield %z : f32
  } -> tensor<4x4xf32>
  %exp = math.exp %sum : tensor<4x4xf32>
  %size = arith.index_cast %n : i32 to index
  %part = tensor.extract_slice %exp[0, 0] [1, %size] [1, 1] : tensor<4x4xf32> to tensor<?xf32>
  return %exp, %part : tensor<4x4xf32>, tensor<?xf32>
}
"""
FILL, DOT, CALL, SUM, EXP, SLICE = range(6)


@pytest.fixture
def base(tmp_path: Path) -> tuple[str, list[int]]:
    """Base module of LINALG, and the numbers of its operations that can be parts."""
    (tmp_path / "given.mlir").write_text(LINALG)
    found = write_mlir_base(str(tmp_path / "given.mlir"), "", str(tmp_path))
    assert (found["function"], found["nodes"]) == ("forward", 6)
    return str(tmp_path / MLIR_MODEL), [number for (number,) in found["parts"]]


def write(base: tuple[str, list[int]], folder: Path, *parts: int) -> tuple[dict[str, Any], str]:
    folder.mkdir()
    found = write_mlir_part(base[0], "forward", [base[1][part] for part in parts], str(folder))
    file = folder / MLIR_MODEL
    return found, file.read_text() if file.exists() else ""


def test_part_gets_values_of_other_operations_as_inputs(base, tmp_path):
    found, text = write(base, tmp_path / "part", DOT)
    assert found["inputs"] == [["x", "float32", [4, 4]], ["value1", "float32", [4, 4]]]
    assert found["nodes"] == 1 and "math.tanh" not in text
    assert "util.global.load @weights" in text and "util.global private @weights" in text
    assert print_mlir(str(tmp_path / "part" / MLIR_MODEL))["operators"] == ["linalg.matmul"]


@pytest.mark.parametrize("number", [0, 1])
def test_new_inputs_have_other_names_than_arguments(tmp_path, number):
    """The reduction finds the values of an input by its name."""
    name = f"value{number}"
    function = f"""
    func.func @f(%a: tensor<4xf32> {{iree.abi.name = "x"}}, %b: tensor<8xf32> {{iree.abi.name = "{name}"}})
        -> (tensor<4xf32>, tensor<8xf32>) {{
      %s = math.exp %a : tensor<4xf32>
      %t = arith.addf %a, %s : tensor<4xf32>
      %u = math.exp %b : tensor<8xf32>
      return %t, %u : tensor<4xf32>, tensor<8xf32>
    }}"""
    (tmp_path / "given.mlir").write_text(function)
    write_mlir_base(str(tmp_path / "given.mlir"), "", str(tmp_path))
    (tmp_path / "part").mkdir()
    for parts, inputs in (([1], ["x", "value_1"]), ([1, 2], ["x", "value_1", name])):
        found = write_mlir_part(str(tmp_path / MLIR_MODEL), "f", parts, str(tmp_path / "part"))
        assert [given for given, *_ in found["inputs"]] == inputs


def write_caller(folder: Path, caller: str, callee: str) -> dict[str, Any]:
    """Write a part with a call of a public function. Return the part."""
    body = "%r = math.exp %a : tensor<4xf32>\n  return %r : tensor<4xf32>"
    functions = {callee: body, caller: body.replace("math.exp %a :", f"func.call @{callee}(%a) : (tensor<4xf32>) ->")}
    texts = [
        f"func.func @{name}(%a: tensor<4xf32>) -> tensor<4xf32> {{\n  {text}\n}}\n" for name, text in functions.items()
    ]
    (folder / "given.mlir").write_text("".join(texts))
    write_mlir_base(str(folder / "given.mlir"), caller, str(folder))
    (folder / "part").mkdir()
    return write_mlir_part(str(folder / MLIR_MODEL), caller, [0], str(folder / "part"))


def test_part_keeps_public_function_that_it_calls(tmp_path):
    assert write_caller(tmp_path, "main", "other")["nodes"] == 1
    described = describe(str(tmp_path / "part" / MLIR_MODEL), "", {})
    assert described["function"] == "main"


@pytest.mark.parametrize("caller", ["main", "other"])
def test_part_that_calls_function_with_its_own_name_is_invalid(tmp_path, caller):
    assert write_caller(tmp_path, caller, "main")["nodes"] == 0


def test_part_contains_numbers_and_functions_that_it_needs(base, tmp_path):
    """The number %i is used in a region, and the function @helper by a call."""
    found, text = write(base, tmp_path / "sum", SUM)
    assert found["inputs"] == [["arg1", "int32", []], ["value1", "float32", [4, 4]]]
    assert "arith.sitofp" in text and "@helper" not in text
    found, text = write(base, tmp_path / "call", CALL)
    assert "func.func private @helper" in text and "arith.sitofp" not in text


def test_outputs_are_values_that_others_use(base, tmp_path):
    write(base, tmp_path / "part", SUM, EXP, SLICE)
    outputs = describe(str(tmp_path / "part" / MLIR_MODEL), "main", {})["outputs"]
    assert [spec[1:] for spec in outputs] == [["float32", [4, 4]], ["float32", [None]]]
    write(base, tmp_path / "inner", DOT, CALL)
    assert len(describe(str(tmp_path / "inner" / MLIR_MODEL), "main", {})["outputs"]) == 1


def test_all_parts_together_keep_inputs(base, tmp_path):
    found, _ = write(base, tmp_path / "part", *range(6))
    assert [name for name, *_ in found["inputs"]] == ["x", "arg1"] and found["nodes"] == 6


def test_onnx_operators_keep_opset_and_names(tmp_path):
    text = """func.func @f(%x: !torch.vtensor<[2,3],f32>) -> !torch.vtensor<[2,3],f32>
      attributes {torch.onnx_meta.opset_version = 17 : si64} {
      %t = torch.operator "onnx.Tanh"(%x) : (!torch.vtensor<[2,3],f32>) -> !torch.vtensor<[2,3],f32>
      %e = torch.operator "onnx.Exp"(%t) : (!torch.vtensor<[2,3],f32>) -> !torch.vtensor<[2,3],f32>
      return %e : !torch.vtensor<[2,3],f32>
    }"""
    (tmp_path / "f.mlir").write_text(text)
    (tmp_path / "part").mkdir()
    found = write_mlir_base(str(tmp_path / "f.mlir"), "f", str(tmp_path))
    part = write_mlir_part(str(tmp_path / MLIR_MODEL), "f", found["parts"][1], str(tmp_path / "part"))
    assert part["inputs"] == [["value0", "float32", [2, 3]]]
    assert "opset_version = 17" in (tmp_path / "part" / MLIR_MODEL).read_text()
    assert print_mlir(str(tmp_path / "part" / MLIR_MODEL))["operators"] == ["onnx.Exp"]


def test_lists_are_not_inputs_or_outputs(tmp_path):
    text = """func.func @f(%x: !torch.vtensor<[2,3],f32>) -> !torch.vtensor<[4,3],f32> {
      %zero = torch.constant.int 0
      %list = torch.prim.ListConstruct %x, %x
        : (!torch.vtensor<[2,3],f32>, !torch.vtensor<[2,3],f32>) -> !torch.list<vtensor<[2,3],f32>>
      %y = torch.aten.cat %list, %zero : !torch.list<vtensor<[2,3],f32>>, !torch.int -> !torch.vtensor<[4,3],f32>
      %z = torch.aten.tanh %y : !torch.vtensor<[4,3],f32> -> !torch.vtensor<[4,3],f32>
      return %z : !torch.vtensor<[4,3],f32>
    }"""
    (tmp_path / "f.mlir").write_text(text)
    found = write_mlir_base(str(tmp_path / "f.mlir"), "", str(tmp_path))
    base = str(tmp_path / MLIR_MODEL)
    counts = []
    for number, part in enumerate(found["parts"]):
        (tmp_path / str(number)).mkdir()
        made = write_mlir_part(base, "f", part, str(tmp_path / str(number)))
        counts.append((made["nodes"], [name for name, *_ in made["inputs"]]))
    assert counts == [(1, ["arg0"]), (1, ["value0"])]


def test_branches_between_blocks_are_not_supported(tmp_path):
    text = """func.func @f(%x: tensor<2xf32>) -> tensor<2xf32> {
      cf.br ^next(%x : tensor<2xf32>)
    ^next(%y: tensor<2xf32>):
      return %y : tensor<2xf32>
    }"""
    (tmp_path / "f.mlir").write_text(text)
    with pytest.raises(ImportFailed, match="function f has 2 blocks"):
        write_mlir_base(str(tmp_path / "f.mlir"), "", str(tmp_path))
