"""Test the output path of `hil compile`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hil.controller.cli.running.compile import compile
from hil.errors import UsageError


def called(*words: object) -> object:
    return CliRunner().invoke(compile, [*map(str, words)], standalone_mode=False, catch_exceptions=False).return_value


def test_compile_rejects_directory_as_output(tmp_path: Path):
    with pytest.raises(UsageError, match=f"-o {tmp_path} is a directory"):
        called(tmp_path / "not-there.onnx", "-o", tmp_path)


@pytest.mark.ci
def test_compile_creates_output_directory(tmp_path: Path, save_onnx, monkeypatch: pytest.MonkeyPatch):
    from onnx import TensorProto, helper

    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))
    values = [("x", TensorProto.FLOAT, [4])], [("y", TensorProto.FLOAT, [4])]
    model = save_onnx([helper.make_node("Relu", ["x"], ["y"])], *values)
    program = tmp_path / "new" / "programs" / "net.onnx"
    assert called(model, "--runtime", "onnxruntime", "-o", program) == 0
    assert program.read_bytes() == model.read_bytes()
