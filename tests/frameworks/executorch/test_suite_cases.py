"""The tests of ExecuTorch's backend tester as hil's cases: found, exported, with inputs and what the module gives."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hil.controller.models.flows import load_flow
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.request import Request
from hil.controller.workloads.suites.sources import open_suite
from hil.errors import ImportFailed

pytest.importorskip("executorch")


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    with Isolated(2) as isolated:
        yield RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture(scope="module")
def operators(context):
    return {spec.id: spec for spec in open_suite(Request("@operators"), load_flow("xnnpack"), context).cases}


@pytest.fixture
def made(operators, context, tmp_path):
    return lambda name: operators[name].make(tmp_path)


def test_there_are_hundreds_with_ids_fit_for_files(operators):
    assert len(operators) > 900
    assert all(re.fullmatch(r"[A-Za-z0-9._+-]+", name) for name in operators)
    assert {"add_dtype-float32", "add_f32_alpha", "lstm_feature_sizes.3"} <= set(operators)


def test_a_case_is_of_its_operator_and_tells_its_parameters(operators):
    spec = operators["conv2d_dtype-float32"]
    assert (spec.op, spec.params) == ("conv2d", {"dtype": "float32"})


def test_a_case_brings_the_program_its_inputs_and_what_the_module_gives(made, context):
    data = made("add_f32_alpha")
    assert [spec.name for spec in import_model(data.path, isolated=context.isolated).inputs] == ["x", "y"]
    np.testing.assert_allclose(data.expected["output"], data.inputs["x"] + 2 * data.inputs["y"], rtol=1e-6)
    assert data.plain_path is None


def test_inputs_within_tuples_keep_their_order(made):
    data = made("index_put_in_place_dtype-float32")
    assert [array.dtype.name for array in data.inputs.values()] == ["float32", "int64", "float32"]


def test_the_same_weights_and_inputs_are_drawn_each_time(operators, context, tmp_path):
    first = operators["conv1d_basic"].make(tmp_path)
    elsewhere = RunContext(Cache(tmp_path / "other"), context.isolated)
    specs = open_suite(Request("@operators"), load_flow("xnnpack"), elsewhere).cases
    again = next(spec for spec in specs if spec.id == "conv1d_basic").make(tmp_path)
    assert first.path != again.path
    for name, array in first.expected.items():
        np.testing.assert_array_equal(array, again.expected[name])


def test_what_does_not_run_or_cannot_be_exported_says_why(made):
    with pytest.raises(ImportFailed, match="does not run: pad should be at most half of effective kernel size"):
        made("avgpool1d_padding.1")
    with pytest.raises(ImportFailed, match=r"torch.export.save refuses it: No registered serialization name"):
        made("median_with_indices.0")


def test_what_the_tester_skips_is_a_case_that_says_so(made):
    with pytest.raises(ImportFailed, match="tester skips it: NaN and Inf are not enforced for backends") as left_out:
        made("abs_edge_cases")
    assert left_out.value.outcome == "SKIP"


def test_a_flow_that_quantises_has_the_plain_model_beside_its_own(context, tmp_path):
    flow = load_flow("xnnpack-static-int8-per-channel")
    cases = {spec.id: spec for spec in open_suite(Request("@operators"), flow, context).cases}
    data = cases["conv2d_basic"].make(tmp_path)
    assert data.path != data.plain_path
    assert list(data.plain_expected) == ["output"] and not data.expected


def test_models_that_need_a_package_that_is_not_there_say_so(context, tmp_path, monkeypatch):
    suite = open_suite(Request("@models"), load_flow("xnnpack"), context)
    by_id = {spec.id: spec for spec in suite.cases}
    if "torchvision" not in by_id:
        assert by_id["mobilenet_v2-static_shapes-float32"].params["use_dynamic_shapes"] == "False"
    else:
        with pytest.raises(ImportFailed, match="No module named 'torchvision'"):
            by_id["torchvision"].make(tmp_path)
