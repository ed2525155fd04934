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
    dtype_name,
    dtype_of,
    float_limits,
    from_bytes,
    int_limits,
    spec_of,
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
    # float8_e8m0fnu is powers of two: it has no 0.
    low = int(dtype == "float8_e8m0fnu")
    return np.asarray(generator.integers(low, low + 2, shape)).astype(dtype_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_a_tensor_comes_back_from_its_bytes(dtype, shape, seed):
    array = random_tensor(dtype, shape, seed)
    back = from_bytes(to_bytes(array), dtype, shape)
    assert back.shape == array.shape
    assert dtype_name(back.dtype) == dtype
    assert (back == array).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_is_named_as_it_is_found(dtype):
    assert dtype_name(dtype_of(dtype)) == dtype


@pytest.mark.parametrize("dtype", [*DTYPES])
def test_a_tensor_comes_back_from_a_file_without_pickle(dtype, tmp_path):
    array = random_tensor(dtype, (2, 3), 1)
    save_npy(tmp_path / "t.npy", array)
    back = load_npy(tmp_path / "t.npy", dtype)
    assert dtype_name(back.dtype) == dtype
    # numpy's fixed-width text drops trailing zero characters.
    expected = np.vectorize(lambda text: text.rstrip("\0"), otypes=[object])(array) if dtype == "string" else array
    assert (back == expected).all()


def test_bytes_are_little_endian_and_in_c_order():
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    assert bytes(to_bytes(array)) == np.array([0, 3, 1, 4, 2, 5], "<i4").tobytes()


@given(st.binary(max_size=64))
def test_broken_string_data_is_refused(data):
    try:
        back = from_bytes(data, "string", (2,))
    except UsageError:
        return
    assert bytes(to_bytes(back)) == data


def test_data_that_does_not_fit_dtype_and_shape_is_refused():
    with pytest.raises(UsageError, match="takes 16 bytes, got 15"):
        from_bytes(b"\0" * 15, "float32", (4,))
    with pytest.raises(UsageError, match="negative"):
        from_bytes(b"", "float32", (-1,))
    with pytest.raises(UsageError, match="unknown dtype"):
        from_bytes(b"", "float12", (0,))


@pytest.mark.parametrize("dtype", ["datetime64[s]", "V3", [("a", "f4")], "longdouble"])
def test_dtypes_that_no_model_has_are_refused(dtype):
    with pytest.raises(UsageError, match="not supported"):
        dtype_name(np.dtype(dtype))


def test_what_is_no_npy_file_is_refused(tmp_path):
    np.save(tmp_path / "pickle.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "many.npz", a=1)
    (tmp_path / "noise.npy").write_bytes(b"noise")
    for name in ("pickle.npy", "many.npz", "noise.npy", "missing.npy"):
        with pytest.raises(UsageError):
            load_npy(tmp_path / name)


def test_a_spec_accepts_what_fits_it():
    spec = TensorSpec("x", "float32", ("N", 3, None))
    assert spec.accepts("float32", (7, 3, 1))
    assert not spec.accepts("float64", (7, 3, 1))
    assert not spec.accepts("float32", (7, 4, 1))
    assert not spec.accepts("float32", (7, 3))
    assert str(spec) == "x: Nx3x? float32"
    assert spec_of("s", np.float32(1).reshape(())).is_static


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
def test_a_shape_is_told_in_one_way_and_every_name_in_it_can_be_read(shape, shown):
    assert type_text("int8", shape) == shown
    assert str(TensorSpec("x", "int8", shape)) == f"x: {shown}"


@pytest.mark.parametrize("name", DTYPES)
def test_limits_are_what_ml_dtypes_says_of_every_dtype(name: str):
    dtype = None if name in ("string", "bool") else dtype_of(name)
    if dtype is not None and "int" in name:
        assert (int_limits(dtype).min, int_limits(dtype).max) == (
            ml_dtypes.iinfo(dtype).min,
            ml_dtypes.iinfo(dtype).max,
        )
    elif dtype is not None:
        for limit in ("eps", "max", "smallest_normal", "smallest_subnormal"):
            assert getattr(float_limits(dtype), limit) == getattr(ml_dtypes.finfo(dtype), limit)
