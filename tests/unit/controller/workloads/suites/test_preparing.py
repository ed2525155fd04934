"""Case options from the user, the flow and the project file, for whole models and layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.models.flows.flow import Flow
from hil.controller.records.suite import SuiteModelFile
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.cases.spec import CaseData, CaseSpec
from hil.controller.workloads.suites.preparing import (
    begin_case,
    choose_board_runtime,
    make_options,
    make_suite_runner,
)
from hil.controller.workloads.suites.request import Settings, SuiteRequest
from hil.core.board_config import BoardConfig
from hil.core.mcu_config import Microcontroller
from hil.core.results import Outcome

DATA = CaseData(Path("made/by/recipe.onnx"))
FILE = SuiteModelFile(path="models/net.onnx", digest="")
WHOLE = CaseSpec("net_full_model", "net", lambda folder: DATA, file=FILE)
LAYER = CaseSpec("net_layer_Conv", "net", lambda folder: DATA, layer="conv", file=FILE)
FLOW = Flow("own", "iree", accept=("logits: top1>=0.9",))


@pytest.mark.parametrize(
    ("has_mcu", "chosen", "runtime"),
    [
        ((True, True), {"is_default_flow": True}, "mcu"),
        ((True, False), {"is_default_flow": True}, ""),
        ((True,), {"is_default_flow": False}, ""),
        ((True,), {"is_default_flow": True, "runtime": "onnxruntime"}, "onnxruntime"),
    ],
)
def test_default_flow_runs_firmware_on_microcontrollers(
    has_mcu: tuple[bool, ...], chosen: dict[str, Any], runtime: str
) -> None:
    boards = [BoardChoice(BoardConfig("m4", "mcu", mcu=Microcontroller(chip="c") if one else None)) for one in has_mcu]
    assert choose_board_runtime(SuiteRequest("models", **chosen), boards).runtime == runtime


def test_user_criteria_replace_flow_criteria() -> None:
    assert make_options(DATA, FLOW, Settings(), WHOLE).accept == ("logits: top1>=0.9",)
    assert make_options(DATA, FLOW, Settings(accept=("rmse<=1",)), WHOLE).accept == ("rmse<=1",)


def test_layers_use_criteria_with_output_names() -> None:
    settings = Settings(accept=("rmse<=1", "logits: argmax"))
    assert make_options(DATA, FLOW, settings, LAYER).accept == ("logits: argmax",)
    assert make_options(DATA, FLOW, settings, WHOLE).accept == settings.accept


def test_project_file_applies_to_whole_models() -> None:
    settings = Settings(per_model={"net.onnx": {"rtol": 0.5, "runtime": "onnxruntime"}, "recipe.onnx": {"atol": 1.0}})
    whole, layer = (make_options(DATA, FLOW, settings, spec) for spec in (WHOLE, LAYER))
    assert (whole.rtol, whole.atol, whole.runtime, whole.per_model) == (0.5, None, "iree", {})
    assert (layer.rtol, layer.atol, layer.per_model) == (None, None, {})


def test_compile_flags_of_flow_model_and_user_are_combined() -> None:
    flow = Flow("own", "iree", compile_flags=("--of-flow",))
    settings = Settings(compile_flags=("--of-user",))
    assert make_options(DATA, flow, settings, LAYER).compile_flags == ("--of-flow", "--of-user")
    settings = Settings(compile_flags=("--of-user",), per_model={"net.onnx": {"compile_flags": ("--of-model",)}})
    assert make_options(DATA, flow, settings, WHOLE).compile_flags == ("--of-flow", "--of-model")
    assert make_options(DATA, flow, settings, LAYER).compile_flags == ("--of-flow", "--of-user")


def test_input_range_applies_to_whole_models() -> None:
    settings = Settings(input_range=(2.0, 3.0))
    assert make_options(DATA, FLOW, settings, WHOLE).input_range == (2.0, 3.0)
    assert make_options(DATA, FLOW, settings, LAYER).input_range is None


@pytest.mark.parametrize(("pattern", "outcome"), [("net.onnx", Outcome.IMPORT_ERROR), ("*.onnx", None)])
def test_model_table_must_name_existing_outputs(
    pattern: str, outcome: Any, save_onnx: Callable[..., Path], cache: Cache, isolated: Isolated, tmp_path: Path
) -> None:
    value = [("x", TensorProto.FLOAT, (2,))], [("y", TensorProto.FLOAT, (2,))]
    data = CaseData(save_onnx([helper.make_node("Neg", ["x"], ["y"])], *value, name="recipe.onnx"))
    spec = CaseSpec("net_full_model", "net", lambda folder: data, file=FILE)
    settings = Settings(per_model={pattern: {"accept": ("yy: argmax",)}})
    case = begin_case(spec, FLOW, make_suite_runner(RunContext(cache, isolated)), tmp_path / "case", settings)
    assert case.outcome is outcome
    assert ("unknown output 'yy'" in case.reason) is (outcome is not None)
