"""Evaluation of dispatches with numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from iree.compiler import ir

from hil.controller.analysis.dispatches.linalg import evaluate_dispatch
from hil.controller.analysis.dispatches.scalars import CannotEvaluate

Array = np.ndarray[Any, Any]
F32, I8, I32, I64 = np.float32, np.int8, np.int32, np.int64


def tensor(kind: str, name: str, access: str = "readonly") -> str:
    return f"%{name}: !iree_tensor_ext.dispatch.tensor<{access}:tensor<{kind}>>"


def slices(kind: str) -> str:
    sizes = [size for size in kind.split("x") if size.isdecimal()]
    fixed = (
        f"{name} = [{', '.join(values)}]"
        for name, values in zip(
            ("offsets", "sizes", "strides"), (["0"] * len(sizes), sizes, ["1"] * len(sizes)), strict=True
        )
    )
    return ", ".join(fixed)


def evaluate(takes: Sequence[str], gives: str, body: str, *values: Array) -> Array:
    """Evaluate a body that reads %0, %1, ... and yields %result."""
    ext = "iree_tensor_ext.dispatch.tensor"
    loads = [
        f"%{number} = {ext}.load %in{number}, {slices(kind)} : !{ext}<readonly:tensor<{kind}>> -> tensor<{kind}>"
        for number, kind in enumerate(takes)
    ]
    arguments = [tensor(kind, f"in{number}") for number, kind in enumerate(takes)]
    text = f"""
    func.func @f({", ".join([*arguments, tensor(gives, "out", "writeonly")])}) {{
      {chr(10).join(loads)}
      {body}
      {ext}.store %result, %out, {slices(gives)} : tensor<{gives}> -> !{ext}<writeonly:tensor<{gives}>>
      return
    }}
    """
    (found,) = evaluate_dispatch(ir.Module.parse(text, context=ir.Context()), values, [-1])
    return found


def elementwise(
    kind: str, body: str, takes: Sequence[str], gives: str, size: str = "4"
) -> tuple[Sequence[str], str, str]:
    """Return the arguments of evaluate for a body over one loop: it reads %a, %b, ... and yields %r."""
    maps = ", ".join(["affine_map<(d0) -> (d0)>"] * (len(takes) + 1))
    operands = ", ".join(f"%{number}" for number in range(len(takes)))
    types = ", ".join(f"tensor<{size}x{one}>" for one in takes)
    names = ", ".join(f"%{'abc'[number]}: {one}" for number, one in enumerate(takes))
    text = f"""
      %e = tensor.empty() : tensor<{size}x{gives}>
      %result = linalg.generic {{indexing_maps = [{maps}], iterator_types = ["parallel"]}}
        ins({operands} : {types}) outs(%e : tensor<{size}x{gives}>) {{
      ^bb0({names}, %o: {gives}):
        {body}
        linalg.yield %r : {gives}
      }} -> tensor<{size}x{gives}>
    """
    return [f"{size}x{one}" for one in takes], f"{size}x{gives}", text


def random(*shape: int) -> Array:
    return np.random.default_rng(3).standard_normal(shape).astype(F32)


def test_matmul_adds_products_to_initial_value() -> None:
    body = """
      %c = arith.constant 2.0 : f32
      %e = tensor.empty() : tensor<3x5xf32>
      %f = linalg.fill ins(%c : f32) outs(%e : tensor<3x5xf32>) -> tensor<3x5xf32>
      %result = linalg.matmul ins(%0, %1 : tensor<3x4xf32>, tensor<4x5xf32>) outs(%f : tensor<3x5xf32>)
        -> tensor<3x5xf32>
    """
    left, right = random(3, 4), random(4, 5)
    found = evaluate(["3x4xf32", "4x5xf32"], "3x5xf32", body, left, right)
    assert found.dtype == F32
    np.testing.assert_allclose(found, left.astype(float) @ right + 2, rtol=1e-6)


@pytest.mark.parametrize("combine", ["arith.maximumf %o, %a", "arith.addf %o, %a"])
def test_strided_window_reduces_with_body(combine: str) -> None:
    body = f"""
      %c = arith.constant 0xFF800000 : f32
      %e = tensor.empty() : tensor<2x2xf32>
      %w = tensor.empty() : tensor<2x2xf32>
      %z = arith.constant 0.0 : f32
      %f = linalg.fill ins({"%c" if "max" in combine else "%z"} : f32) outs(%e : tensor<2x2xf32>) -> tensor<2x2xf32>
      %result = linalg.generic {{indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0 * 2 + d2, d1 * 2 + d3)>,
          affine_map<(d0, d1, d2, d3) -> (d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1)>],
          iterator_types = ["parallel", "parallel", "reduction", "reduction"]}}
        ins(%0, %w : tensor<4x4xf32>, tensor<2x2xf32>) outs(%f : tensor<2x2xf32>) {{
      ^bb0(%a: f32, %b: f32, %o: f32):
        %r = {combine} : f32
        linalg.yield %r : f32
      }} -> tensor<2x2xf32>
    """
    value = random(4, 4)
    windows = value.reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(2, 2, 4)
    wanted = windows.max(axis=2) if "max" in combine else windows.astype(float).sum(axis=2)
    np.testing.assert_allclose(evaluate(["4x4xf32"], "2x2xf32", body, value), wanted, rtol=1e-6)


def test_convolution_multiplies_windows() -> None:
    body = """
      %z = arith.constant 0.0 : f32
      %e = tensor.empty() : tensor<1x2x4xf32>
      %f = linalg.fill ins(%z : f32) outs(%e : tensor<1x2x4xf32>) -> tensor<1x2x4xf32>
      %result = linalg.conv_1d_ncw_fcw {dilations = dense<1> : vector<1xi64>, strides = dense<1> : vector<1xi64>}
        ins(%0, %1 : tensor<1x3x6xf32>, tensor<2x3x3xf32>) outs(%f : tensor<1x2x4xf32>) -> tensor<1x2x4xf32>
    """
    value, weights = random(1, 3, 6), random(2, 3, 3)
    wanted = [[sum(np.correlate(value[0, channel], one[channel], "valid") for channel in range(3)) for one in weights]]
    np.testing.assert_allclose(
        evaluate(["1x3x6xf32", "2x3x3xf32"], "1x2x4xf32", body, value, weights), wanted, rtol=1e-5, atol=1e-6
    )


def test_softmax_normalizes_along_dimension() -> None:
    body = """
      %e = tensor.empty() : tensor<2x3xf32>
      %result = linalg.softmax dimension(1) ins(%0 : tensor<2x3xf32>) outs(%e : tensor<2x3xf32>) -> tensor<2x3xf32>
    """
    value = np.array([[0, math.log(3), 1e4], [0, 0, 0]], F32)
    np.testing.assert_allclose(evaluate(["2x3xf32"], "2x3xf32", body, value), [[0, 0, 1], [1 / 3] * 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "left", "right", "wanted"),
    [
        ("arith.divsi", -7, 2, -3),
        ("arith.remsi", -7, 2, -1),
        ("arith.floordivsi", -7, 2, -4),
        ("arith.shrui", -1, 31, 1),
        ("arith.shrsi", -8, 1, -4),
        ("arith.maxui", -1, 5, -1),
        ("arith.minui", -1, 5, 5),
        ("arith.divui", -2, 2, (1 << 31) - 1),
    ],
)
def test_integer_operations_have_signs_of_names(name: str, left: int, right: int, wanted: int) -> None:
    arguments = elementwise("i32", f"%r = {name} %a, %b : i32", ["i32", "i32"], "i32")
    found = evaluate(*arguments, np.full(4, left, I32), np.full(4, right, I32))
    assert found.dtype == I32 and found.tolist() == [wanted] * 4


@pytest.mark.parametrize(
    ("predicate", "wanted"),
    [
        ("oeq", [0, 1, 0, 0]),
        ("ult", [1, 0, 0, 1]),
        ("ogt", [0, 0, 1, 0]),
        ("une", [1, 0, 1, 1]),
        ("uno", [0, 0, 0, 1]),
        ("ord", [1, 1, 1, 0]),
    ],
)
def test_float_comparison_follows_predicate_for_nan(predicate: str, wanted: list[int]) -> None:
    body = f"""%t = arith.cmpf {predicate}, %a, %b : f32
      %r = arith.extui %t : i1 to i32"""
    arguments = elementwise("f32", body, ["f32", "f32"], "i32")
    assert evaluate(*arguments, np.array([1, 2, 3, np.nan], F32), np.full(4, 2, F32)).tolist() == wanted


def test_unsigned_comparison_reads_bits_as_unsigned() -> None:
    body = """%t = arith.cmpi ugt, %a, %b : i32
      %r = arith.select %t, %a, %b : i32"""
    arguments = elementwise("i32", body, ["i32", "i32"], "i32")
    assert evaluate(*arguments, np.array([-1, 1, 7, 0], I32), np.full(4, 5, I32)).tolist() == [-1, 5, 7, 5]


def test_quantization_rounds_in_precision_of_ir() -> None:
    body = """%s = arith.constant 0.1 : f32
      %low = arith.constant -128.0 : f32
      %d = arith.divf %a, %s : f32
      %n = math.roundeven %d : f32
      %m = arith.maximumf %n, %low : f32
      %r = arith.fptosi %m : f32 to i8"""
    value = np.array([0.25, -0.35, 0.05, -99], F32)
    found = evaluate(*elementwise("f32", body, ["f32"], "i8"), value)
    assert found.dtype == I8 and found.tolist() == np.maximum(np.rint(value / F32(0.1)), -128).tolist()


def test_math_functions_match_numpy() -> None:
    body = """%x = math.erf %a : f32
      %y = math.rsqrt %b : f32
      %r = math.fma %x, %y, %a : f32"""
    left, right = random(4), np.abs(random(4)) + 1
    wanted = [math.erf(one) / math.sqrt(other) + one for one, other in zip(left, right, strict=True)]
    np.testing.assert_allclose(
        evaluate(*elementwise("f32", body, ["f32", "f32"], "f32"), left, right), wanted, rtol=1e-5
    )


def test_gather_reads_rows_by_index() -> None:
    body = """
      %e = tensor.empty() : tensor<2x3xf32>
      %result = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0, d1)>],
          iterator_types = ["parallel", "parallel"]} ins(%1 : tensor<2xi64>) outs(%e : tensor<2x3xf32>) {
      ^bb0(%a: i64, %o: f32):
        %row = arith.index_cast %a : i64 to index
        %column = linalg.index 1 : index
        %r = tensor.extract %0[%row, %column] : tensor<4x3xf32>
        linalg.yield %r : f32
      } -> tensor<2x3xf32>
    """
    table = random(4, 3)
    found = evaluate(["4x3xf32", "2xi64"], "2x3xf32", body, table, np.array([3, 1], I64))
    assert np.array_equal(found, table[[3, 1]])
    with pytest.raises(CannotEvaluate, match="outside"):
        evaluate(["4x3xf32", "2xi64"], "2x3xf32", body, table, np.array([4, 0], I64))


def test_read_write_buffer_keeps_other_elements() -> None:
    ext = "iree_tensor_ext.dispatch.tensor"
    text = f"""
    func.func @f({tensor("2xf32", "in")}, {tensor("4xf32", "out", "readwrite")}) {{
      %0 = {ext}.load %in, {slices("2xf32")} : !{ext}<readonly:tensor<2xf32>> -> tensor<2xf32>
      {ext}.store %0, %out, offsets = [1], sizes = [2], strides = [1] : tensor<2xf32>
        -> !{ext}<readwrite:tensor<4xf32>>
      return
    }}
    """
    given = [np.array([5, 6], F32), np.array([1, 2, 3, 4], F32)]
    (found,) = evaluate_dispatch(ir.Module.parse(text, context=ir.Context()), given, [1])
    assert found.tolist() == [1, 5, 6, 4] and given[1].tolist() == [1, 2, 3, 4]
    new = text.replace("readwrite", "writeonly")
    with pytest.raises(CannotEvaluate, match="partly written"):
        evaluate_dispatch(ir.Module.parse(new, context=ir.Context()), given[:1], [-1])


def test_unsupported_operation_is_named() -> None:
    arguments = elementwise("i32", "%r = math.ctpop %a : i32", ["i32"], "i32")
    with pytest.raises(CannotEvaluate, match=r"math\.ctpop"):
        evaluate(*arguments, np.zeros(4, I32))


def test_too_large_reduction_is_left_to_cpu_backend() -> None:
    body = """
      %z = arith.constant 0.0 : f32
      %e = tensor.empty() : tensor<f32>
      %f = linalg.fill ins(%z : f32) outs(%e : tensor<f32>) -> tensor<f32>
      %result = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> ()>],
          iterator_types = ["reduction"]} ins(%0 : tensor<300000xf32>) outs(%f : tensor<f32>) {
      ^bb0(%a: f32, %o: f32):
        %r = arith.maximumf %a, %o : f32
        linalg.yield %r : f32
      } -> tensor<f32>
    """
    with pytest.raises(CannotEvaluate, match="reduction of this size"):
        evaluate(["300000xf32"], "f32", body, np.zeros(300000, F32))
