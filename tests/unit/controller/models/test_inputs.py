from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from support.waiting import allowed_s

from hil.controller.models.inputs import fix_sizes, make_inputs, make_random_tensor, parse_input
from hil.core.npy import save_npy
from hil.core.results import Model
from hil.core.tensors import DTYPES, TensorSpec, get_dtype_name
from hil.errors import UsageError

X = TensorSpec("x", "float32", (2, 3))
N = TensorSpec("n", "int64", ())
U = TensorSpec("u", "uint8", (4,))
SPECS = [X, N, U]
SIX = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", SIX)
    np.savez("all.npz", x=SIX, n=np.int64(7))
    np.savez("order.npz", SIX, np.int64(7))
    (tmp_path / "x.bin").write_bytes(SIX.tobytes())
    (tmp_path / "x.pb").write_bytes(numpy_helper.from_array(SIX).SerializeToString())
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "x=x.npy",
        "x.npy",
        "@x.npy",
        "x=all.npz:x",
        "all.npz:x",
        "x=x.pb",
        "2x3xf32=@x.bin",
        "x=2x3xf32=@x.bin",
        "2x3xf32=@x.npy",
        "2x3xf32=0 1 2 3 4 5",
        "2x3xf32=[[0 1 2][3 4 5]]",
        "x=2x3xf32=0,1,2,3,4,5",
    ],
)
def test_parse_input_accepts_every_notation(folder: Path, text: str) -> None:
    given = parse_input(text, SPECS)
    assert list(given) == ["x"]
    np.testing.assert_array_equal(given["x"], SIX)
    assert given["x"].dtype == np.float32


@pytest.mark.parametrize("name", ["all.npz", "order.npz"])
def test_make_inputs_reads_archive(folder: Path, name: str) -> None:
    made = make_inputs(SPECS, [name])
    np.testing.assert_array_equal(made["x"], SIX)
    assert made["n"] == 7 and made["n"].dtype == np.int64 and made["u"].shape == (4,)


def test_make_inputs_assigns_unnamed_inputs_in_order(folder: Path) -> None:
    made = make_inputs(SPECS, ["u=4xui8=9", "x.npy", "7"])
    assert made["n"] == 7 and (made["u"] == 9).all() and made["x"][1, 2] == 5


@pytest.mark.parametrize(
    ("text", "spec", "expected"),
    [
        ("4xi8=200", U, np.full(4, 200, np.uint8)),  # IREE's i8 has no sign
        ("4xf32", TensorSpec("z", "float32", (4,)), np.zeros(4, np.float32)),
        ("i64=-7", N, np.array(-7)),
        ("2xi1=1 false", TensorSpec("b", "bool", (2,)), np.array([True, False])),
        ("3xbf16=1.5", TensorSpec("b", "bfloat16", (3,)), np.full(3, 1.5, ml_dtypes.bfloat16)),
        ("2xcomplex<f32>=1+2j", TensorSpec("c", "complex64", (2,)), np.full(2, 1 + 2j, np.complex64)),
        ("2xi4=-8 7", TensorSpec("i", "int4", (2,)), np.array([-8, 7], ml_dtypes.int4)),
        ("0x3xf32", TensorSpec("e", "float32", (0, 3)), np.zeros((0, 3), np.float32)),
        ("2xui64=18446744073709551615", TensorSpec("l", "uint64", (2,)), np.full(2, (1 << 64) - 1, np.uint64)),
        ("2xf32=nan inf", TensorSpec("f", "float32", (2,)), np.array([np.nan, np.inf], np.float32)),
    ],
)
def test_parse_input_accepts_iree_run_module_values(text: str, spec: TensorSpec, expected: np.ndarray) -> None:
    array = parse_input(text, [spec])[spec.name]
    assert array.dtype == expected.dtype and array.shape == expected.shape
    assert np.array_equal(array.astype(expected.dtype), expected) or np.isnan(expected.astype(float)).any()


def test_parse_input_reads_packed_int4(tmp_path: Path) -> None:
    (tmp_path / "i.bin").write_bytes(bytes([0xF1, 0x02]))
    spec = TensorSpec("i", "int4", (3,))
    assert parse_input(f"3xi4=@{tmp_path / 'i.bin'}", [spec])["i"].tolist() == [1, -1, 2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4", "string"])
def test_make_inputs_restores_dtype_of_saved_tensor(tmp_path: Path, dtype: str) -> None:
    spec = TensorSpec("x", dtype, (5,))
    array = make_random_tensor(spec, (5,), seed=3)
    save_npy(tmp_path / "x.npy", array)
    assert make_inputs([spec], [f"x={tmp_path / 'x.npy'}"])["x"].tolist() == array.tolist()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("y=x.npy", "unknown or duplicate tensor 'y'"),
        ("x=nope.npy", "no such file"),
        ("x=x.txt", "invalid tensor value 'x.txt'"),
        ("u=x.npy", "'u': expected 4 uint8, got 2x3 float32"),
        ("3x2xf32=1", "'x': expected 2x3 float32, got 3x2 float32"),
        ("x=2x3xf64=1", "'x': expected 2x3 float32, got 2x3 float64"),
        ("x=2x3xf32=1 2", "2 values, expected 6"),
        ("u=4xui8=300", "out of range for uint8"),
        ("u=4xui8=1.5", "invalid uint8 value in '1.5'"),
        ("2x3xf32=@nope.bin", "No such file"),
        ("2x4xf32=@x.bin", "needs 32 bytes, got 24"),
        ("x=all.npz", "has several arrays"),
        ("x=all.npz:q", "has no array 'q'"),
        ("bad.npz", "not a readable .npz"),
        ("x=bad.npy", "not a readable .npy"),
        ("x=bad.pb", "is not an ONNX tensor"),
        ("more.npz", "unknown tensor 'other' in more.npz"),
    ],
)
def test_make_inputs_reports_invalid_text(folder: Path, text: str, words: str) -> None:
    (folder / "x.txt").write_text("?")
    for name in ("bad.npz", "bad.npy", "bad.pb"):
        (folder / name).write_bytes(b"\x93 broken")
    np.savez("more.npz", x=SIX, other=SIX)
    with pytest.raises(UsageError) as caught:
        make_inputs(SPECS, [text])
    assert words in caught.value.message


def test_make_inputs_rejects_pickle(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UsageError, match="not a readable"):
        make_inputs(SPECS, [f"x={tmp_path / 'x.npy'}"])


def test_make_inputs_rejects_surplus_and_duplicates(folder: Path) -> None:
    with pytest.raises(UsageError, match="every tensor of the model already has a value"):
        make_inputs([X], ["x.npy", "x.npy"])
    with pytest.raises(UsageError, match="unknown or duplicate tensor '"):
        make_inputs([X, N], ["x=x.npy", "x=x.npy"])
    with pytest.raises(UsageError, match="every tensor of the model already has a value"):
        make_inputs([], ["x.npy"])


def test_make_inputs_checks_arrays_without_conversion() -> None:
    made = make_inputs(SPECS, {"x": SIX})
    assert made["x"] is SIX and list(made) == ["x", "n", "u"]
    with pytest.raises(UsageError, match="expected 2x3 float32, got 2x3 float64"):
        make_inputs(SPECS, {"x": SIX.astype(np.float64)})
    with pytest.raises(UsageError, match="no input 'z'"):
        make_inputs(SPECS, {"z": SIX})


def test_make_inputs_preserves_nan_array() -> None:
    array = np.full((2, 3), np.nan, np.float32)
    assert make_inputs(SPECS, {"x": array})["x"] is array


def test_parse_input_accepts_unusual_names(tmp_path: Path) -> None:
    spec = TensorSpec("a=b:0", "float32", (1,))
    assert parse_input("a=b:0=1xf32=4", [spec])["a=b:0"][0] == 4


def test_make_inputs_resolves_symbolic_dimensions() -> None:
    specs = [TensorSpec("a", "float32", ("N", 2)), TensorSpec("b", "float32", ("N",))]
    with pytest.raises(UsageError) as caught:
        make_inputs(specs, [])
    assert "--dim N=1" in caught.value.hint
    assert make_inputs(specs, [], dims={"N": 3})["b"].shape == (3,)
    assert make_inputs(specs, {"a": np.zeros((5, 2), np.float32)})["b"].shape == (5,)
    with pytest.raises(UsageError, match="has size 4 for dimension 'N', expected 5"):
        make_inputs(specs, {"a": np.zeros((5, 2), np.float32), "b": np.zeros(4, np.float32)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (50, 20)])
def test_random_tensor_supports_every_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec("x", dtype, shape)
    array = make_random_tensor(spec, shape, seed=1)
    assert get_dtype_name(array.dtype) == dtype and array.shape == shape
    assert array.tolist() == make_random_tensor(spec, shape, seed=1).tolist()
    if array.size > 1:
        assert array.tolist() != make_random_tensor(spec, shape, seed=2).tolist()
        assert array.tolist() != make_random_tensor(TensorSpec("other", dtype, shape), shape, seed=1).tolist()
        assert len(set(array.ravel().tolist())) > 1
        if dtype != "string":
            assert np.isfinite(array.astype(np.complex128)).all()


@given(st.floats(-300, 300), st.floats(0, 300), st.sampled_from([d for d in DTYPES if d not in ("bool", "string")]))
def test_random_tensor_stays_in_bounds(low: float, width: float, dtype: str) -> None:
    spec = TensorSpec("x", dtype, (64,))
    try:
        array = make_random_tensor(spec, (64,), seed=0, bounds=(low, low + width))
    except UsageError:
        return
    values = array.astype(np.complex128).real
    slack = 0 if "int" in dtype else 0.6 * max(abs(low), abs(low + width)) + 0.3  # rounding to a coarse float
    assert (values >= low - slack).all() and (values <= low + width + slack).all()


def test_user_range_overrides_model_range() -> None:
    spec = TensorSpec("i", "int64", (100,))
    assert make_inputs([spec], [], ranges={"i": (0, 9)})["i"].max() <= 9
    assert set(make_inputs([spec], [], ranges={"i": (0, 9)}, user_range=(20, 20))["i"].tolist()) == {20}
    with pytest.raises(UsageError, match="no uint8 value between"):
        make_inputs([U], [], user_range=(-5, -1))


def test_random_tensor_returns_fixed_values() -> None:
    """Fixed values: a change here changes every stored result."""
    assert make_random_tensor(TensorSpec("x", "int8", (4,)), (4,), seed=0).tolist() == INT8
    assert make_random_tensor(TensorSpec("x", "float32", (2,)), (2,), seed=0).tolist() == FLOAT32


INT8 = [89, -66, -54, 123]
FLOAT32 = [2.323540687561035, -0.32770758867263794]


def test_make_inputs_reads_strings_of_pb_file(tmp_path: Path) -> None:
    tensor = onnx.helper.make_tensor("s", onnx.TensorProto.STRING, [2], [b"a", "é".encode()])
    (tmp_path / "s.pb").write_bytes(tensor.SerializeToString())
    spec = TensorSpec("s", "string", (2,))
    assert make_inputs([spec], [f"s={tmp_path / 's.pb'}"])["s"].tolist() == ["a", "é"]


def test_make_inputs_casts_raw_npz_bytes(tmp_path):
    given = np.arange(4, dtype=ml_dtypes.bfloat16)
    np.savez(tmp_path / "x.npz", x=given)
    raw = dict(np.load(tmp_path / "x.npz"))
    assert raw["x"].dtype.kind == "V"
    (made,) = make_inputs([TensorSpec("x", "bfloat16", (4,))], raw).values()
    assert made.dtype == given.dtype
    np.testing.assert_array_equal(made, given)


@pytest.mark.parametrize(
    "text",
    ["9" * 6000 + "xf32", "a" * 70_000 + "\0", "1" * 70_000, "1x" * 35_000, "f32" * 20_000 + "=", "+1e" * 20_000],
)
def test_parse_input_handles_long_text_quickly(text: str) -> None:
    began = time.monotonic()
    with contextlib.suppress(UsageError):
        parse_input(text, [X])
    assert time.monotonic() - began < allowed_s(5)


def open_model(format: str, **more: Any) -> Model:
    inputs = TensorSpec("x", "float32", ("N", 3, "2*N")), TensorSpec("y", "float32", ("N",))
    return Model("m", format, Path("m"), {}, "", inputs=inputs, **more)


GIVEN = {"x": np.zeros((4, 3, 8), np.float32), "y": np.zeros(4, np.float32)}


@pytest.mark.parametrize("format", ["onnx", "mlir", "tf", "keras"])
def test_with_sizes_of_fixes_open_dimensions(format):
    model = fix_sizes(open_model(format, dims={"M": 2}), GIVEN)
    assert model.dims == {"M": 2, "N": 4, "2*N": 8}
    assert [spec.shape for spec in model.inputs] == [(4, 3, 8), (4,)]


def test_with_sizes_of_skips_expressions_of_pt2():
    model = fix_sizes(open_model("pt2", producer={"dims": {"N": [1, 8]}}), GIVEN)
    assert model.dims == {"N": 4}


@pytest.mark.parametrize("format", ["vmfb", "pte", "tflite", "so", "hilb"])
def test_with_sizes_of_skips_compiled_programs(format):
    model = open_model(format)
    assert fix_sizes(model, GIVEN) is model
