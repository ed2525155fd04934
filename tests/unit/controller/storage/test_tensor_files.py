"""Test tensor files from untrusted sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from hil.controller.storage.tensor_files import load_pb
from hil.errors import UsageError


def _external() -> TensorProto:
    tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret")
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        TensorProto(data_type=TensorProto.FLOAT, dims=[1 << 40, 1 << 40]),
        TensorProto(data_type=TensorProto.FLOAT, dims=[-1], raw_data=bytes(8)),
        TensorProto(data_type=TensorProto.FLOAT, dims=[3], raw_data=bytes(8)),
        TensorProto(data_type=TensorProto.INT4, dims=[1 << 50], raw_data=bytes(8)),
        TensorProto(data_type=99, dims=[2], raw_data=bytes(8)),
        TensorProto(data_type=TensorProto.STRING, dims=[1], string_data=[b"\xff"]),
        TensorProto(),
        _external(),
    ],
    ids=["huge", "negative", "short", "packed", "dtype", "text", "empty", "external"],
)
def test_load_pb_rejects_hostile_tensor(tmp_path: Path, tensor: TensorProto):
    (tmp_path.parent / "secret").write_bytes(bytes(8))
    (tmp_path / "x.pb").write_bytes(tensor.SerializeToString())
    with pytest.raises(UsageError, match="is not an ONNX tensor"):
        load_pb(tmp_path / "x.pb")


def test_load_pb_reads_onnx_tensor(tmp_path: Path):
    array = np.arange(6, dtype=np.int8).reshape(2, 3)
    (tmp_path / "x.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())
    assert (load_pb(tmp_path / "x.pb") == array).all()
