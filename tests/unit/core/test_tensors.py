from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hil.core.npy import load_npy, save_npy
from hil.core.tensors import (
    DTYPES,
    TensorSpec,
    from_bytes,
    get_dtype_name,
    get_float_limits,
    get_int_limits,
    make_spec,
    parse_dtype,
    to_bytes,
    type_text,
)
from hil.errors import UsageError

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if dtype == "string":
        array = np.empty(shape, object)
        array[...] = ""
        for index in np.ndindex(shape):
            array[index] = "ab\u00e9\u4e2d\0x"[: generator.integers(0, 7)]
        return array
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    # float8_e8m0fnu contains only powers of two, so 0 is not representable.
    low = int(dtype == "float8_e8m0fnu")
    return np.asarray(generator.integers(low, low + 2, shape)).astype(parse_dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_tensor_bytes_round_trip(dtype, shape, seed):
    array = random_tensor(dtype, shape, seed)
    back = from_bytes(to_bytes(array), dtype, shape)
    assert back.shape == array.shape
    assert get_dtype_name(back.dtype) == dtype
    assert (back == array).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_names_round_trip(dtype):
    assert get_dtype_name(parse_dtype(dtype)) == dtype


@pytest.mark.parametrize("dtype", [*DTYPES])
def test_npy_file_round_trips_without_pickle(dtype, tmp_path):
    array = random_tensor(dtype, (2, 3), 1)
    save_npy(tmp_path / "t.npy", array)
    back = load_npy(tmp_path / "t.npy", dtype)
    assert get_dtype_name(back.dtype) == dtype
    # numpy's fixed-width text drops trailing NUL characters.
    expected = np.vectorize(lambda text: text.rstrip("\0"), otypes=[object])(array) if dtype == "string" else array
    assert (back == expected).all()


def test_to_bytes_writes_little_endian_c_order():
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    assert bytes(to_bytes(array)) == np.array([0, 3, 1, 4, 2, 5], "<i4").tobytes()


@given(st.binary(max_size=64))
def test_from_bytes_rejects_broken_string_data(data):
    try:
        back = from_bytes(data, "string", (2,))
    except UsageError:
        return
    assert bytes(to_bytes(back)) == data


def test_from_bytes_rejects_size_shape_or_dtype_mismatch():
    with pytest.raises(UsageError, match="needs 16 bytes, got 15"):
        from_bytes(b"\0" * 15, "float32", (4,))
    with pytest.raises(UsageError, match="negative"):
        from_bytes(b"", "float32", (-1,))
    with pytest.raises(UsageError, match="unknown dtype"):
        from_bytes(b"", "float12", (0,))


@pytest.mark.parametrize("dtype", ["datetime64[s]", "V3", [("a", "f4")], "longdouble"])
def test_dtype_name_rejects_unsupported_dtype(dtype):
    with pytest.raises(UsageError, match="not supported"):
        get_dtype_name(np.dtype(dtype))


def test_load_npy_rejects_other_files(tmp_path):
    np.save(tmp_path / "pickle.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "many.npz", a=1)
    (tmp_path / "noise.npy").write_bytes(b"noise")
    for name in ("pickle.npy", "many.npz", "noise.npy", "missing.npy"):
        with pytest.raises(UsageError):
            load_npy(tmp_path / name)


def test_tensor_spec_accepts_matching_tensors():
    spec = TensorSpec("x", "float32", ("N", 3, None))
    assert spec.accepts("float32", (7, 3, 1))
    assert not spec.accepts("float64", (7, 3, 1))
    assert not spec.accepts("float32", (7, 4, 1))
    assert not spec.accepts("float32", (7, 3))
    assert str(spec) == "x: Nx3x? float32"
    assert make_spec("s", np.float32(1).reshape(())).is_static


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ((), "scalar int8"),
        ((0,), "0 int8"),
        ((1, 10), "1x10 int8"),
        (("N", 4, None), "Nx4x? int8"),
        (("batch", 4), "batch x 4 int8"),
        ((2, "x.dim1", None), "2 x x.dim1 x ? int8"),
    ],
)
def test_type_text_formats_every_shape(shape, shown):
    assert type_text("int8", shape) == shown
    assert str(TensorSpec("x", "int8", shape)) == f"x: {shown}"


@pytest.mark.parametrize("name", [name for name in DTYPES if "int" in name])
def test_int_limits_match_ml_dtypes(name: str):
    found, expected = get_int_limits(parse_dtype(name)), ml_dtypes.iinfo(parse_dtype(name))
    assert (found.min, found.max) == (expected.min, expected.max)


@pytest.mark.parametrize("name", [name for name in DTYPES if "float" in name or "complex" in name])
def test_float_limits_match_ml_dtypes(name: str):
    for limit in ("eps", "max", "smallest_normal", "smallest_subnormal"):
        assert getattr(get_float_limits(parse_dtype(name)), limit) == getattr(ml_dtypes.finfo(parse_dtype(name)), limit)
