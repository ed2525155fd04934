"""Tests of ExecuTorch's backend tester as hil cases: discovery, export, inputs and expected outputs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hil.controller.models.flows.flow_registry import load_flow
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.cases.sources import open_suite
from hil.controller.workloads.suites.request import SuiteRequest
from hil.errors import ImportFailed

pytest.importorskip("executorch")


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    with Isolated(2) as isolated:
        yield RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture(scope="module")
def operators(context):
    return {spec.id: spec for spec in open_suite(SuiteRequest("@operators"), load_flow("xnnpack"), context).cases}


@pytest.fixture
def made(operators, context, tmp_path):
    return lambda name: operators[name].make(tmp_path)


def test_operator_suite_has_over_900_cases_with_file_safe_ids(operators):
    assert len(operators) > 900
    assert all(re.fullmatch(r"[A-Za-z0-9._+-]+", name) for name in operators)
    assert {"add_dtype-float32", "add_f32_alpha", "lstm_feature_sizes.3"} <= set(operators)


def test_operator_case_has_operator_and_parameters(operators):
    spec = operators["conv2d_dtype-float32"]
    assert (spec.op, spec.params) == ("conv2d", {"dtype": "float32"})


def test_operator_case_provides_inputs_and_expected_outputs(made, context):
    data = made("add_f32_alpha")
    assert [spec.name for spec in import_model(data.path, isolated=context.isolated).inputs] == ["x", "y"]
    np.testing.assert_allclose(data.expected["output"], data.inputs["x"] + 2 * data.inputs["y"], rtol=1e-6)
    assert data.plain_path is None


def test_operator_case_preserves_order_of_tuple_inputs(made):
    data = made("index_put_in_place_dtype-float32")
    assert [array.dtype.name for array in data.inputs.values()] == ["float32", "int64", "float32"]


def test_operator_case_draws_same_weights_and_inputs(operators, context, tmp_path):
    first = operators["conv1d_basic"].make(tmp_path)
    elsewhere = RunContext(Cache(tmp_path / "other"), context.isolated)
    specs = open_suite(SuiteRequest("@operators"), load_flow("xnnpack"), elsewhere).cases
    again = next(spec for spec in specs if spec.id == "conv1d_basic").make(tmp_path)
    assert first.path != again.path
    for name, array in first.expected.items():
        np.testing.assert_array_equal(array, again.expected[name])


def test_operator_case_explains_run_and_export_failures(made):
    with pytest.raises(ImportFailed, match="does not run: pad should be at most half of effective kernel size"):
        made("avgpool1d_padding.1")
    with pytest.raises(ImportFailed, match=r"torch.export.save failed: No registered serialization name"):
        made("median_with_indices.0")


def test_operator_case_reports_tester_skip(made):
    with pytest.raises(ImportFailed, match="tester skips it: NaN and Inf are not enforced for backends") as left_out:
        made("abs_edge_cases")
    assert left_out.value.outcome == "SKIP"


def test_quantized_case_includes_plain_model(context, tmp_path):
    flow = load_flow("xnnpack-static-int8-per-channel")
    cases = {spec.id: spec for spec in open_suite(SuiteRequest("@operators"), flow, context).cases}
    data = cases["conv2d_basic"].make(tmp_path)
    assert data.path != data.plain_path
    assert list(data.plain_expected) == ["output"] and not data.expected


def test_model_case_reports_missing_package(context, tmp_path, monkeypatch):
    suite = open_suite(SuiteRequest("@models"), load_flow("xnnpack"), context)
    by_id = {spec.id: spec for spec in suite.cases}
    if "torchvision" not in by_id:
        assert by_id["mobilenet_v2-static_shapes-float32"].params["use_dynamic_shapes"] == "False"
    else:
        with pytest.raises(ImportFailed, match="No module named 'torchvision'"):
            by_id["torchvision"].make(tmp_path)
