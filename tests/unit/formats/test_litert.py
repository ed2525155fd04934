"""TFLite files without tensor names, and with custom operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models import DIGITS

from hil.controller.models.importers.programs import describe_tflite
from hil.errors import ImportFailed, LoadFailed
from hil.formats.litert import open_signature

pytest.importorskip("ai_edge_litert")

FLOAT = DIGITS.parent / "tflite" / "digits.tflite"


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """Write a model without signatures, changed by a function of its ``ModelT``."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    def write(change: Callable[[Any], None]) -> Path:
        model = schema.ModelT.InitFromPackedBuf(FLOAT.read_bytes(), 0)
        model.signatureDefs = []
        change(model)
        builder = flatbuffers.Builder()
        builder.Finish(model.Pack(builder), b"TFL3")
        path = tmp_path / "changed.tflite"
        path.write_bytes(builder.Output())
        return path

    return write


def remove_names(model: Any) -> None:
    for tensor in model.subgraphs[0].tensors:
        tensor.name = b""


def add_custom(name: bytes) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        from ai_edge_litert import schema_py_generated as schema

        code = schema.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
        code.customCode = name
        model.operatorCodes.append(code)

    return change


def test_open_signature_names_unnamed_tensors_by_position(changed: Callable[..., Path]) -> None:
    opened = open_signature(changed(remove_names), "", kernels="builtin")
    assert [spec.name for spec in (*opened.inputs, *opened.outputs)] == ["input0", "output0"]


def test_litert_rejects_unknown_custom_operator(changed: Callable[..., Path]) -> None:
    path = changed(add_custom(b"MyOwnOp"))
    with pytest.raises(LoadFailed, match="custom operators that LiteRT lacks: MyOwnOp"):
        open_signature(path, "")
    with pytest.raises(ImportFailed, match="MyOwnOp") as caught:
        describe_tflite(str(path), "", {})
    assert "built-in TFLite operators" in caught.value.hint


def test_open_signature_loads_builtin_custom_operator(changed: Callable[..., Path]) -> None:
    assert open_signature(changed(add_custom(b"TFLite_Detection_PostProcess")), "").inputs
