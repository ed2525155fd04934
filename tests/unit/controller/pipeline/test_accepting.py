"""Criteria as options have them: functions are loaded, and outputs must exist."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from hil.controller.pipeline.settings.model_settings import refuse_functions
from hil.controller.pipeline.settings.options import CaseSettings, parse_accept_option
from hil.controller.pipeline.verdicts.accepting import check_accepted_outputs, load_function, load_rules
from hil.core.results import Model
from hil.core.tensors import TensorSpec
from hil.errors import UsageError

JUDGE = """
import numpy
LIMIT = 0.5

def near(actual, reference):
    return bool(abs(actual - reference).max() < LIMIT)
"""


def model(*outputs: str) -> Model:
    specs = tuple(TensorSpec(name, "float32", (1,)) for name in outputs)
    return Model("m", "onnx", Path("m.onnx"), {}, "blake3:0", outputs=specs)


def test_load_function_reloads_changed_file(tmp_path: Path) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE)
    assert load_function(str(judge), "near")(np.ones(2), np.ones(2) + 0.25) is True
    judge.write_text(JUDGE.replace("0.5", "0.125"))
    assert load_function(str(judge), "near")(np.ones(2), np.ones(2) + 0.25) is False


@pytest.mark.parametrize(
    "content, message, hint",
    [
        (JUDGE, "function 'neer' not found in", "did you mean 'near'"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError", ""),
        ("raise SystemExit(1)", "cannot be loaded: SystemExit", ""),
        ("def (", "cannot be loaded: SyntaxError", ""),
    ],
)
def test_load_function_reports_invalid_file(content: str, message: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(content)
    with pytest.raises(UsageError) as caught:
        load_rules([f"y: python:{tmp_path}/judge.py:neer"])
    assert message in caught.value.message and hint in caught.value.hint


def test_load_function_rejects_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_function(str(tmp_path / "judge.py"), "near")


def test_accept_option_makes_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    monkeypatch.chdir(tmp_path)
    assert parse_accept_option(("y: python:judge.py:near", "rmse<=1")) == (
        f"y: python:{tmp_path}/judge.py:near",
        "rmse<=1",
    )
    with pytest.raises(UsageError, match="invalid --hil-accept"):
        parse_accept_option(("y: nothing",), "--hil-accept")


def test_accepted_output_must_exist_in_a_model() -> None:
    texts, wrong = ["logits: argmax", "rmse<=1"], ["logitz: argmax"]
    boxes, logits = model("boxes"), model("logits")
    check_accepted_outputs([(texts, boxes), (texts, logits)])
    with pytest.raises(UsageError, match="unknown output 'logitz'"):
        check_accepted_outputs([(wrong, logits), (wrong, boxes)])
    # A compiled program may have unknown outputs.
    unknown = dataclasses.replace(model(), outputs=None)
    check_accepted_outputs([(wrong, logits), (wrong, unknown), (wrong, None)])


def test_accepted_output_must_exist_in_matching_model() -> None:
    with pytest.raises(UsageError, match="unknown output 'boxes'"):
        check_accepted_outputs([(["boxes: argmax"], model("logits")), (["kl<=1"], model("boxes"))])


def test_functions_in_foreign_settings_are_rejected() -> None:
    text = "y: python:/tmp/judge.py:near"
    refuse_functions(CaseSettings(accept=("argmax",), per_model={"*": {"accept": ("kl<=1",)}}))
    for settings in (CaseSettings(accept=(text,)), CaseSettings(per_model={"*": {"accept": (text,)}})):
        with pytest.raises(UsageError, match="Python function cannot be used here"):
            refuse_functions(settings)
