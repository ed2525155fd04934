"""Element types as iree-run-module compares them."""

from __future__ import annotations

import numpy as np
import pytest

from hil.controller.pipeline.settings.flagfiles import find_tool_difference, make_comparable, parse_element_type
from hil.core.results import Model, RunResult
from hil.core.tensors import TensorSpec, parse_dtype


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("2x3xsi64=1", "si64"),
        ("4xi8", "i8"),
        ("f32=1.5", "f32"),
        ("2xbf16=@x.bin", "bf16"),
        ("2xcomplex<f32>=1 2", "complex<f32>"),
        ("3", ""),
        ("(ignored)", ""),
    ],
)
def test_element_type_reads_text(text, kind):
    assert parse_element_type(text) == kind


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("int64", "si64"), ("uint8", "ui8"), ("bool", "i1"), ("float32", "f32"), ("complex64", "complex<f32>")],
)
def test_element_type_reads_file(tmp_path, dtype, kind):
    np.save(tmp_path / "x.npy", np.zeros(2, dtype))
    assert parse_element_type(f"@{tmp_path}/x.npy") == kind


def gives(*arrays):
    return RunResult("board", {f"y{number}": array for number, array in enumerate(arrays)})


@pytest.mark.parametrize(
    ("wanted", "dtype", "said"),
    [
        ("i64", "int64", ""),
        ("i8", "uint8", ""),
        ("si64", "int64", "expected si64, got i64"),
        ("ui8", "uint8", "expected ui8, got i8"),
        ("i1", "bool", ""),
        ("i8", "bool", "expected i8, got i1"),
        ("f32", "float32", ""),
        ("", "int64", ""),
    ],
)
def test_tool_differs_reports_other_integer_type(wanted, dtype, said):
    given = gives(np.ones(3, dtype))
    reason = find_tool_difference(given, given, [wanted], {"x": np.zeros(3, np.float32)})
    assert said in reason and bool(said) == bool(reason)


@pytest.mark.parametrize(("wanted", "said"), [("ui8", ""), ("i8", "expected i8, got ui8")])
def test_tool_differs_uses_unsigned_declaration(wanted, said):
    given = gives(np.ones(3, np.uint8))
    declared = [TensorSpec("y0", "int8", (3,))]
    reason = find_tool_difference(given, given, [wanted], {}, declared)
    assert said in reason and bool(said) == bool(reason)


def test_tool_differs_preserves_sign_of_passed_input():
    same = np.array([3, 4], np.int64)
    assert not find_tool_difference(gives(same), gives(same), ["si64"], {"x": same.copy()})
    assert find_tool_difference(gives(same), gives(same), ["si64"], {"x": np.array([3, 5], np.int64)})


@pytest.mark.parametrize(("dtype", "told"), [("float32", False), ("complex64", True), ("float8_e5m2", True)])
def test_tool_differs_compares_some_types_bitwise(dtype, told):
    zeros = [np.array([sign * 0.0, 1], parse_dtype(dtype)) for sign in (1, -1)]
    assert bool(find_tool_difference(gives(zeros[0]), gives(zeros[1]), ["f8E5M2"], {})) == told
    assert not find_tool_difference(gives(zeros[0]), gives(zeros[0]), ["f8E5M2"], {})
    assert not find_tool_difference(gives(zeros[0]), gives(zeros[1]), [""], {})


def test_comparable_drops_ignored_outputs_and_sets_sign(tmp_path):
    unknown = tuple(TensorSpec(f"y{number}", "", ()) for number in range(2))
    model = Model("m", "vmfb", tmp_path, {}, "", outputs=unknown)
    reference = RunResult("expected", {"output1": np.array([255], np.uint8)}, provenance={"ignored": [0]})
    result = gives(np.zeros(2), np.array([-1], np.int8))
    outputs = make_comparable(result, reference, model).outputs
    assert list(outputs) == ["y1"] and outputs["y1"].dtype == np.uint8 and outputs["y1"].tolist() == [255]
    known = (unknown[0], TensorSpec("y1", "int8", (1,)))
    model = Model("m", "vmfb", tmp_path, {}, "", outputs=known)
    assert make_comparable(result, reference, model).outputs["y1"].dtype == np.int8
