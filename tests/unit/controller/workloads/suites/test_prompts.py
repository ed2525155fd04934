"""Prompts next to a model: NAME.generate.toml makes a case per prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper
from support.contexts import context_without_workers
from support.models import save_model
from support.tflite_decoder import save_tflite_decoder

from hil.controller.models.flows.flow import Flow
from hil.controller.models.generation import decode
from hil.controller.models.sizing.dimensions import find_symbols
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.cases.model_scan import scan_models
from hil.controller.workloads.suites.cases.sources import open_suite
from hil.controller.workloads.suites.cases.spec import CaseSpec
from hil.controller.workloads.suites.preparing import make_options
from hil.controller.workloads.suites.request import Settings, SuiteRequest
from hil.core.results import Model
from hil.core.tensors import TensorSpec
from hil.errors import ImportFailed, UsageError

FLOW = Flow("onnxruntime", "onnxruntime")
PROMPTS = """
tokenizer = "words.json"
[[prompt]]
name = "hello world"
tokens = [1, 2]
[[prompt]]
tokens = [3]
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """Save a model with prompts. Return the specification."""
    node = helper.make_node("Identity", ["x"], ["y"])
    sides = [[(name, TensorProto.FLOAT, [3])] for name in "xy"]
    save_model(tmp_path / "net.onnx", [node], *sides)
    path = tmp_path / "net.generate.toml"
    path.write_text(PROMPTS.replace('tokenizer = "words.json"', ""))
    return path


def list_cases(folder: Path, isolated: Isolated) -> tuple[CaseSpec, ...]:
    context = RunContext(Cache(folder / "cache"), isolated)
    return open_suite(SuiteRequest(str(folder)), FLOW, context).cases


def test_model_with_prompts_has_case_per_prompt(spec: Path, isolated: Isolated):
    cases = list_cases(spec.parent, isolated)
    assert [case.id for case in cases] == ["net_hello_world", "net_prompt-2"]
    data = cases[0].make(spec.parent)
    assert (data.generate, data.prompt, data.path) == (spec, "hello world", spec.parent / "net.onnx")
    options = make_options(data, replace(FLOW, rtol=1.0, references=("numpy",)), Settings(atol=1.0), cases[0])
    assert (options.generate, options.prompt) == (spec, "hello world")
    assert (options.references, options.rtol, options.atol) == ((), None, None)


def test_case_changes_with_prompts(spec: Path, isolated: Isolated):
    before = list_cases(spec.parent, isolated)[0].content
    spec.write_text(spec.read_text() + "\n")
    assert list_cases(spec.parent, isolated)[0].content != before


def test_decoder_with_several_functions_has_case_per_prompt(tmp_path: Path, isolated: Isolated):
    pytest.importorskip("ai_edge_litert")
    model = save_tflite_decoder(tmp_path / "net.tflite", [2])
    (tmp_path / "net.generate.toml").write_text("[[prompt]]\ntokens = [1, 2]\n")
    context = RunContext(Cache(tmp_path / "cache"), isolated)
    (case,) = open_suite(SuiteRequest(str(tmp_path)), Flow("tflite", "tflite"), context).cases
    assert case.make(tmp_path).path == model and case.content and case.file is not None


def test_sizes_of_decoder_with_several_functions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def import_model(path: Path, *, function: str, dims: Any, **_: Any) -> Model:
        if function != "decode":
            raise UsageError("several functions", option="--function")
        return Model("m", "tflite", path, {}, "digest", inputs=(TensorSpec("x", "float32", ("batch",)),))

    monkeypatch.setattr(decode, "import_model", import_model)
    assert find_symbols(Path("m.tflite"), context_without_workers(tmp_path)) == {"batch"}


def test_invalid_specification_is_case_with_error(spec: Path, isolated: Isolated):
    spec.write_text("steps = 3")
    (case,) = list_cases(spec.parent, isolated)
    with pytest.raises(ImportFailed, match=r"net\.generate\.toml"):
        case.make(spec.parent)
    assert case.id == "net_full_model"


def test_scan_includes_specification_and_tokenizer(spec: Path):
    spec.write_text(PROMPTS)
    (model,) = scan_models(spec.parent).models
    assert model.generate == spec and {spec, spec.parent / "words.json"} <= {*model.beside}
