"""Invalid outputs of a package's reference fail the reference, not the board."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hil.controller.backends.references import run_reference
from hil.controller.pipeline.settings.options import Options
from hil.controller.pipeline.tools import make_reference_settings
from hil.controller.storage.run_context import RunContext
from hil.core.results import Model
from hil.core.tensors import TensorSpec
from hil.errors import ReferenceFailed

INPUTS = {"x": np.zeros((2, 4), np.float32)}
MODULE = """
from pathlib import Path
import numpy as np
from hil.plugins import Reference, load_tensors, save_tensors

def compute(model, inputs, outputs, **_):
    {body}

X = Reference(("onnx", "mlir"), lambda: {source}, compute)
"""


@pytest.fixture
def answer(package, settings: dict[str, Any], tmp_path: Path):
    """Return a function that runs ``--reference odd`` with this implementation."""

    def run(body: str, source: str = "'odd 1'", format: str = "onnx") -> Any:
        package(MODULE.format(body=body, source=source), "[hil.references]\nodd = MODULE:X\n")
        outputs = (TensorSpec("y", "float32", ("N", 3)), TensorSpec("n", "int64", ()))
        path = tmp_path / "m"
        model = Model("m", format, path, {"m": path}, "digest", "", (TensorSpec("x", "float32", (2, 4)),), outputs)
        return run_reference("odd", model, INPUTS, **settings)

    return run


def saving(outputs: str) -> str:
    return f"save_tensors(outputs, dict({outputs}))"


RIGHT = "y=np.ones((5, 3), np.float32), n=np.int64(3)"


def test_package_reference_accepts_declared_outputs(answer) -> None:
    assert list(answer(saving(RIGHT)).outputs) == ["y", "n"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "cannot read the outputs of the reference odd of the package vendor 1.0"),
        (saving(""), "returned no outputs: the model declares y: .*, n: "),
        (saving("y=np.ones((2, 3), np.float32)"), "package vendor 1.0 returned y: .*: the model declares y: .*, n: "),
        (saving(RIGHT.replace("y=", "logits=")), "returned logits: .*: the model declares y: "),
        (saving(RIGHT.replace("float32", "float64")), "returned y: .*64.*: the model declares y: "),
        (saving(RIGHT.replace("(5, 3)", "(5, 4)")), "returned y: .*4.*: the model declares y: "),
        (saving(RIGHT.replace("(5, 3)", "3")), "returned y: .*: the model declares y: "),
    ],
)
def test_package_reference_fails_for_undeclared_outputs(answer, body: str, message: str) -> None:
    for _ in range(2):  # the failure is not cached
        with pytest.raises(ReferenceFailed, match=message):
            answer(body)


def test_package_reference_matches_outputs_by_position(answer) -> None:
    assert list(answer(saving(RIGHT.replace("y=", "result=")), format="mlir").outputs) == ["result", "n"]
    with pytest.raises(ReferenceFailed, match="the model declares"):
        answer(saving(RIGHT.replace("y=", "result=").replace("int64", "int32")), "'odd 2'", "mlir")


@pytest.mark.parametrize(
    ("source", "message"),
    [("1 / 0", "ZeroDivisionError: division by zero"), ("3", r"TypeError: expected a string from source\(\), got 3")],
)
def test_package_reference_without_source_fails(answer, source: str, message: str) -> None:
    with pytest.raises(ReferenceFailed, match=f"the reference odd of the package vendor 1.0 failed: {message}"):
        answer("pass", source)


def test_reference_settings_use_given_timeout(tmp_path: Path, settings: dict[str, Any]) -> None:
    context = RunContext(settings["cache"], settings["isolated"])
    assert make_reference_settings(Options(timeout=5), context, tmp_path / "log")["timeout"] == 5
