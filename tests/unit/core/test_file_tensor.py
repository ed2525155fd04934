"""Tensors in files: results match numpy, and no file can crash the process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hil.core import file_tensor
from hil.core.npy import open_npy
from hil.errors import UsageError


@pytest.mark.ci
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_file_tensor_reads_match_numpy(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "tensor.npy"
    shape = data.draw(st.lists(st.integers(0, 6), max_size=5).map(tuple))
    dtype = data.draw(st.sampled_from(["<f4", ">f8", "<c8", "|b1", "<U3"]))
    wanted = (np.arange(int(np.prod(shape))) % 100).astype(dtype).reshape(shape)
    if data.draw(st.booleans()):
        wanted = np.asfortranarray(wanted)
    np.save(path, wanted)
    with pytest.MonkeyPatch.context() as patched:
        # Small limits, so that small tensors use every read strategy.
        patched.setattr(file_tensor, "_SPAN", data.draw(st.sampled_from([4, 40, 4 << 20])))
        patched.setattr(file_tensor, "_GAP", data.draw(st.sampled_from([1, 20, 16 << 10])))
        found = open_npy(path)
        np.testing.assert_array_equal(np.asarray(found), wanted)
        start, stop = (data.draw(st.integers(0, wanted.size + 2)) for _ in range(2))
        np.testing.assert_array_equal(found.elements(start, stop), wanted.reshape(-1)[start:stop])
        places = tuple(
            data.draw(st.one_of(st.integers(0, dim - 1), st.slices(dim).filter(lambda one: one.step in (1, None))))
            if dim
            else slice(None)
            for dim in shape[: data.draw(st.integers(0, len(shape)))]
        )
        np.testing.assert_array_equal(np.asarray(found[places].T), np.asarray(wanted[places]).T)


def test_file_tensor_reads_large_tensors(tmp_path: Path) -> None:
    path = tmp_path / "tensor.npy"
    wanted = np.arange(3 << 20, dtype=np.float32).reshape(3, 1024, 1024)
    np.save(path, wanted)
    found = open_npy(path)
    np.testing.assert_array_equal(np.asarray(found), wanted)
    np.testing.assert_array_equal(np.asarray(found[:, :, 7].T), wanted[:, :, 7].T)
    np.testing.assert_array_equal(np.asarray(found[:, 7]), wanted[:, 7])


def test_file_tensor_reports_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "tensor.npy"
    np.save(path, np.zeros((100, 1000), np.float32))
    found = open_npy(path)
    os.truncate(path, 5000)
    assert np.asarray(found[0]).size == 1000
    with pytest.raises(UsageError, match="was truncated"):
        found.elements(50_000, 50_001)
