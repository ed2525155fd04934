"""Inputs of Python functions, and of the file next to a model."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hil.controller.cli.main import call
from hil.controller.models.inputs import make_inputs
from hil.controller.pipeline.settings.given_inputs import add_inputs_file, describe_inputs_file
from hil.controller.pipeline.settings.options import RunSettings, parse_tensors_option
from hil.core.tensors import TensorSpec
from hil.errors import UsageError

SPECS = (TensorSpec("x", "float32", (2,)), TensorSpec("y=", "bfloat16", (1,)), TensorSpec("s", "string", (1,)))
LOADER = """
import numpy as np, ml_dtypes
print("loading")
Y, S = np.ones(1, ml_dtypes.bfloat16), np.array(["\\u00e4"])

def one():
    print("working")
    return {"x": np.array([1, 2], np.float32), "y=": Y, "s": S}

def in_order():
    return [np.array([1, 2], np.float32), Y, S]

def single():
    return np.array([3, 4], np.float32)

def several():
    number = 0
    while True:
        yield {"x": np.full(2, number, np.float32)}
        number += 1

def listed():
    return [{"x": np.full(2, number, np.float32)} for number in range(3)]

def only():
    yield {"x": np.full(2, 7, np.float32)}

def empty():
    return {}

def nothing():
    return iter(())

def fail():
    raise SystemExit("no data")

def ragged():
    return {"x": [[1], [1, 2]]}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))
    Path("load.py").write_text(LOADER)
    return tmp_path


def x_of(*texts: str) -> list[float]:
    return list(make_inputs(SPECS, parse_tensors_option(texts))["x"].tolist())


@pytest.mark.parametrize("name", ["one", "in_order"])
def test_function_returns_all_inputs(name, capsys):
    (text,) = parse_tensors_option([f"load.py:{name}"])
    assert capsys.readouterr().out == ""
    inputs = make_inputs(SPECS, [text])
    assert inputs["x"].tolist() == [1, 2]
    assert inputs["y="].dtype == ml_dtypes.bfloat16 and inputs["s"].tolist() == ["ä"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["load.py:single"], [3, 4]),
        (["x=load.py:single"], [3, 4]),
        (["x=load.py:one"], [1, 2]),
        (["load.py:only"], [7, 7]),
        (["load.py:several[4]"], [4, 4]),
        (["x=load.py:several[0]"], [0, 0]),
        (["load.py:listed[2]"], [2, 2]),
        (["y==load.py:one", "x=load.py:single"], [3, 4]),
    ],
)
def test_function_returns_one_input(texts, expected):
    assert x_of(*texts) == expected


def test_other_texts_are_unchanged():
    texts = ("x=a.npy", "2xf32=1 2", "x=b.npz:key", "py:x", "x.py")
    assert parse_tensors_option(texts) == texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("load.py:several", "yields several samples, expected one"),
        ("load.py:listed", "yields several samples, expected one"),
        ("load.py:listed[3]", "has no sample 3"),
        ("load.py:one[1]", "has no sample 1"),
        ("load.py:nothing", "has no sample 0"),
        ("load.py:empty", "returns no tensors"),
        ("load.py:fail", "failed: SystemExit: no data"),
        ("load.py:ragged", "cannot convert --input load.py:ragged: x to an array"),
        ("z=load.py:one", "returns no tensor 'z'"),
        ("load.py:onee", "function 'onee' not found"),
        ("nothing.py:one", "nothing.py cannot be read"),
    ],
)
def test_invalid_function_is_reported(text, message):
    with pytest.raises(UsageError) as error:
        parse_tensors_option([text])
    assert message in error.value.message


def test_stored_texts_name_no_function():
    """A stored run, a farm job or a flag file must not run code of another user."""
    (text,) = parse_tensors_option(["load.py:one"])
    assert ".py" not in text
    with pytest.raises(UsageError, match="invalid tensor value 'load"):
        make_inputs(SPECS, ["load.py:single"])


def test_completion_does_not_load_function(monkeypatch, capsys):
    Path("load.py").write_text("import pathlib\npathlib.Path('loaded').touch()\ndef one(): pass\n")
    monkeypatch.setenv("_HIL_COMPLETE", "bash_complete")
    for option in ("--input load.py:one", "--accept python:load.py:one"):
        monkeypatch.setenv("COMP_LINE", f"hil run m.onnx {option} --fault corr")
        assert call() == 0
        assert capsys.readouterr().out == "plain,corrupt\n"
    assert not Path("loaded").exists()


def test_file_next_to_model_has_inputs():
    model = Path("models/net.onnx")
    model.parent.mkdir()
    assert add_inputs_file(RunSettings(), model).inputs == ()
    np.savez("models/net.inputs.npz", x=np.array([5, 6], np.float32))
    found = add_inputs_file(RunSettings(), model)
    assert make_inputs(SPECS[:1], found.inputs)["x"].tolist() == [5, 6]
    assert describe_inputs_file(RunSettings(), found, model) == "net.onnx: inputs from net.inputs.npz"


def test_model_in_working_directory_has_no_name(monkeypatch):
    # A SavedModel is a directory.
    Path("net").mkdir()
    monkeypatch.chdir("net")
    assert add_inputs_file(RunSettings(), Path()).inputs == add_inputs_file(RunSettings(), Path("/")).inputs == ()
    np.savez("../net.inputs.npz", x=np.ones(2))
    assert add_inputs_file(RunSettings(), Path()).inputs == (str(Path("../net.inputs.npz").resolve()),)


@pytest.mark.parametrize(
    "settings",
    [RunSettings(inputs=("x=a.npy",)), RunSettings(input_range=(0.0, 1.0)), RunSettings(generate=Path("spec.toml"))],
)
def test_given_settings_replace_file_next_to_model(settings):
    np.savez("net.inputs.npz", x=np.ones(2))
    assert add_inputs_file(settings, Path("net.onnx")) is settings
    assert describe_inputs_file(settings, settings, Path("net.onnx")) == ""
