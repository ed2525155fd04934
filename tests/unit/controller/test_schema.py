"""Test that `--json` output matches docs/run.schema.json and docs/commands.schema.json."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from onnx import TensorProto, helper
from support.commands import run_hil
from support.models import DIGITS, save_model
from support.schemas import SCHEMAS, check_document
from support.waiting import eventually

HIL = [sys.executable, "-m", "hil.controller.cli.main"]
FLOAT = TensorProto.FLOAT


# One case of each outcome is enough for local runs.
LATER = pytest.mark.ci


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with models and tensors."""
    made = tmp_path_factory.mktemp("schema")
    x = ("x", FLOAT, ["N"])
    save_model(made / "twice.onnx", [helper.make_node("Add", ["x", "x"], ["y"])], [x], [("y", FLOAT, ["N"])])
    save_model(made / "odd.onnx", [helper.make_node("Frobnicate", ["x"], ["y"])], [x], [("y", FLOAT, ["N"])])
    np.save(made / "x.npy", np.array([1, 2, 3], np.float32))
    np.save(made / "nan.npy", np.array([np.nan, np.inf, 3], np.float32))
    np.save(made / "wrong.npy", np.zeros(4, np.float64))
    return made


@pytest.fixture(scope="module")
def call(folder: Path) -> Callable[..., Any]:
    """Run `hil ARGS --json` in that directory and check the exit code in the document."""
    environment = {**os.environ, "HIL_CACHE_DIR": str(folder / "cache")}

    def run(*args: object) -> Any:
        done = run_hil([*map(str, args), "--json"], environment, folder)
        document = done.document
        if "id" not in document or args[0] == "run":  # `runs show` prints the exit code of the shown run
            assert document.get("exit_code", 0) == done.code
        return document

    return run


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_valid(name):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        (["twice.onnx", "--input", "x.npy", "--iterations", 3, "--reference", "onnxruntime", "--warmup", 1], "PASS"),
        (["twice.onnx", "--input", "x.npy", "--runtime", "onnxruntime", "--expected", "nan.npy"], "FAIL"),
        pytest.param(
            ["twice.onnx", "--input", "x.npy", "--runtime", "onnxruntime", "--expected", "wrong.npy"],
            "FAIL",
            marks=pytest.mark.ci,
        ),
        pytest.param(["twice.onnx", "--input", "nan.npy", "--runtime", "onnxruntime"], "PASS", marks=LATER),
        pytest.param(["twice.onnx", "--dim", "N=3", "--fault", "crash"], "RUN_CRASH", marks=LATER),
        (["twice.onnx", "--dim", "N=3", "--fault", "kill-agent"], "BOARD_LOST"),
        (["odd.onnx", DIGITS / "digits_cnn_int8.onnx", "--dim", "N=3", "--runtime", "onnxruntime"], None),
    ],
)
def test_run_output_matches_schema(call, folder, options, outcome):
    document = call("run", *options)
    assert document.get("outcome") == outcome or outcome is None, document
    check_document(document, file="run")
    if "folder" in document:
        check_document(json.loads((folder / document["folder"] / "run.json").read_text()), "run", "run")
        check_document(call("runs", "show", document["id"]), "run", "run")


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        ["run", "missing.onnx"],
        ["run", "twice.onnx"],
        ["run", "twice.onnx", "--rtol", 2],
        ["run", "twice.onnx", "--iterations", "many"],
        ["run", "twice.onnx", "--no-such-option"],
        ["run", "twice.onnx", "--dim", "N=3", "--fault", "earthquake"],
        ["compile", "odd.onnx"],
        ["compare", "x.npy", "missing.npy"],
        ["board", "show", "nowhere"],
        ["runs", "show", "nothing"],
        ["nonsense"],
    ],
)
def test_error_output_matches_schema(call, options):
    document = call(*options)
    check_document(document, "error", "run")
    assert document["error"]["message"]


@pytest.mark.ci
def test_interrupted_run_output_matches_schema(folder):
    command = [*HIL, "run", "twice.onnx", "--dim", "N=3", "--fault", "hang", "--out", "cut", "--json"]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    eventually(lambda: list(folder.glob("cut/*/twice/inputs/*.npy")), process=process)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    check_document(json.loads(out), "error", "run")
    assert json.loads(out)["error"]["kind"] == "Interrupted"
    (path,) = folder.glob("cut/*/run.json")
    check_document(json.loads(path.read_text()), "run", "run")


@pytest.mark.ci
def test_command_output_matches_schemas(call):
    calls = [
        ["compile", "twice.onnx", "--dim", "N=3", "-o", "twice.vmfb"],
        ["compare", "x.npy", "nan.npy"],
        ["board", "list"],
        ["board", "show", "sim-f16"],
        ["board", "check"],
        ["board", "recover"],
        ["runs", "list"],
        ["runs", "gc", "--keep", 0],
        ["layers", "twice.onnx", "--dim", "N=3"],
        ["bisect", "twice.onnx", "--dim", "N=3"],
        ["flows"],
        ["suite", "list", "twice.onnx", "--dim", "N=3"],
        ["suite", "list", "twice.onnx", "--dim", "N=3", "--filter", "nothing"],
        ["suite", "run", "twice.onnx", "--dim", "N=3", "--out", "one"],
        ["suite", "run", "twice.onnx", "--dim", "N=3", "--fault", "crash", "--out", "two"],
        ["suite", "diff", "one", "two"],
        ["suite", "diff", "two", "one"],
        ["cache", "ls"],
        ["cache", "gc"],
    ]
    definitions = SCHEMAS["commands.schema.json"]["$defs"]
    for options in calls:
        verb = " ".join(options[:2]) if " ".join(map(str, options[:2])) in definitions else options[0]
        check_document(call(*options), verb)


@pytest.mark.ci
def test_run_schema_rejects_unknown_keys(call):
    document = call("run", "twice.onnx", "--dim", "N=3", "--runtime", "onnxruntime")
    document["cases"][0]["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError):
        check_document(document, file="run")
