"""JSON output of `hil bundle` and `python -m hil.agent verify` matches docs/commands.schema.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.bundle_files import bundle
from support.models import save_model
from support.schemas import check_document

from hil.agent import verify
from hil.bundles.layout import Head, iter_pieces
from hil.controller.cli import main


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., Any]:
    """Return a function that runs `hil bundle ARGS --json` in this process and returns the validated document."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))

    def run(verb: str, *arguments: object, code: int = 0) -> Any:
        monkeypatch.setattr(sys, "argv", ["hil", "bundle", verb, *map(str, arguments), "--json"])
        ended = main.call()
        document = json.loads(capsys.readouterr().out)
        assert ended == document["exit_code"] == code
        if code == 2:
            check_document(document, "error", "run")
        else:
            check_document(document, f"bundle {verb}")
        return document

    return run


def test_bundle_documents_match_schema(call, tmp_path, capsys):
    value = (TensorProto.FLOAT, ["N"])
    save_model(tmp_path / "m.onnx", [helper.make_node("Add", ["x", "x"], ["y"])], [("x", *value)], [("y", *value)])
    np.savez("one.npz", x=np.ones(3, np.float32), y=np.full(3, 2, np.float32))
    np.savez("nan.npz", x=np.ones(3, np.float32), y=np.array([2, np.nan, 2], np.float32))
    options = ("m.onnx", "--runtime", "onnxruntime", "--case", "one.npz", "--case", "nan.npz", "--rtol", 0.01)
    created = call("create", *options)
    assert call("inspect", "m.hilb") == created
    assert call("verify", "m.hilb")["cases"] == 2
    assert [case["outcome"] for case in call("run", "m.hilb", code=1)["cases"]] == ["PASS", "FAIL"]
    call("export", "m.hilb", "out", "--to", "golden")
    assert call("import", "out", "--from", "golden", "-o", "again.hilb")["digest"] == created["digest"]
    assert (tmp_path / "again.hilb").read_bytes() == (tmp_path / "m.hilb").read_bytes()
    assert verify.main(["m.hilb", "--json"]) == 1
    check_document(json.loads(capsys.readouterr().out), "python -m hil.agent verify")


@pytest.mark.parametrize("words", [["missing.hilb"], ["missing.hilb", "--jsno"], [], ["m.hilb", "--timeout", "x"]])
def test_verify_prints_error_document(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert verify.main([*words, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    check_document(document, "error", "run")
    assert document["exit_code"] == 2


def test_forged_signature_raises_error_document(call, tmp_path):
    made = bundle(tmp_path)
    forged = Head(made.head.size, made.head.manifest, b"k" * 32, b"s" * 64)
    (tmp_path / "f.hilb").write_bytes(b"".join(bytes(one) for one in iter_pieces(forged, list(made._blobs.values()))))
    for verb in ("inspect", "verify", "run"):
        assert "the bundle's signature by key" in call(verb, "f.hilb", code=2)["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "missing.hilb"),
        ("verify", "missing.hilb"),
        ("run", "missing.hilb"),
        ("export", "missing.hilb", "out", "--to", "golden"),
        ("export", "missing.hilb", "out", "--to", "gold"),
        ("import", "missing", "--from", "golden"),
        ("create", "missing.onnx"),
        ("create", "missing.onnx", "--cases", "-1"),
    ],
)
def test_error_documents_match_schema(call, arguments):
    assert call(*arguments, code=2)["error"]["message"]
