"""The node tests of the installed onnx as cases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.flow_registry import load_flow
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.cases.operators import make_operator_cases
from hil.controller.workloads.suites.cases.spec import CaseData, CaseSpec

pytestmark = pytest.mark.slow  # making the cases takes onnx some ten seconds


@pytest.fixture(scope="module")
def context(isolated: Isolated, shared_cache: Path) -> RunContext:
    return RunContext(Cache(shared_cache), isolated)


@pytest.fixture(scope="module")
def cases(context: RunContext) -> dict[str, CaseSpec]:
    return {case.id: case for case in make_operator_cases(load_flow("onnxruntime"), context)}


@pytest.fixture
def made(cases: dict[str, CaseSpec], context: RunContext, tmp_path: Path) -> Iterator[object]:
    yield lambda name: cases[name].make(tmp_path)


def test_operator_cases_have_sorted_valid_ids(cases):
    assert len(cases) > 1000
    assert list(cases) == sorted(cases)
    assert all(re.fullmatch(r"[A-Za-z0-9._+-]+", name) for name in cases)
    assert {"add", "conv_with_strides_padding", "lstm_defaults"} <= set(cases)


def test_operator_case_has_model_tensors_and_tolerance(made):
    data: CaseData = made("matmul_2d")
    assert [node.op_type for node in onnx.load(data.path).graph.node] == ["MatMul"]
    assert list(data.inputs) == ["a", "b"]
    np.testing.assert_allclose(data.inputs["a"] @ data.inputs["b"], data.expected["c"], rtol=1e-5)
    assert (data.rtol, data.atol) == (1e-3, 1e-7)
    assert data.plain_path is None


@pytest.mark.parametrize(
    ("case", "tensor", "dtype"),
    [
        ("cast_FLOAT_to_BFLOAT16", "output", "bfloat16"),
        ("cast_FLOAT_to_FLOAT8E4M3FN", "output", "float8_e4m3fn"),
        ("cast_FLOAT_to_INT4", "output", "int4"),
        ("string_concat", "result", "object"),
    ],
)
def test_operator_cases_preserve_unusual_dtypes(made, case, tensor, dtype):
    assert made(case).expected[tensor].dtype == dtype


def test_operator_cases_preserve_strings_and_empty_shapes(made):
    assert made("string_concat").expected["result"].ravel().tolist() == ["abc.com", "def.net"]
    assert made("split_zero_size_splits_opset18").expected["output_1"].shape == (0,)


def test_operator_case_omits_non_tensor_outputs(made):
    assert made("sequence_insert_at_back").expected == {}


def test_expanded_function_has_separate_operator_name(cases):
    assert cases["add"].op == "Add"
    assert cases["clip"].op == "Clip"
    assert cases["clip_expanded"].op == "Clip (expanded)"


def test_content_digest_depends_on_flow(context, cases):
    (content,) = {case.content for case in cases.values()}
    (other,) = {case.content for case in make_operator_cases(load_flow("iree"), context)}
    assert content and other and content != other


def test_operator_cases_use_shared_cache(context, cases):
    before = [(entry.key, entry.path.stat().st_mtime_ns) for entry in context.cache.ls() if entry.kind == "node-tests"]
    assert [case.id for case in make_operator_cases(load_flow("onnxruntime"), context)] == list(cases)
    after = [(entry.key, entry.path.stat().st_mtime_ns) for entry in context.cache.ls() if entry.kind == "node-tests"]
    assert len(before) == 1 and before == after


def test_recipe_case_compares_with_plain_model(context, tmp_path):
    flow = Flow("half", "onnxruntime", recipe="float16")
    (case,) = [case for case in make_operator_cases(flow, context) if case.id == "matmul_2d"]
    data = case.make(tmp_path)
    assert data.plain_path is not None
    assert "Cast" in {node.op_type for node in onnx.load(data.path).graph.node}
    assert "Cast" not in {node.op_type for node in onnx.load(data.plain_path).graph.node}
    assert data.expected == {}
    assert list(data.plain_expected) == ["c"]
    assert (data.rtol, data.atol) == (None, None)
