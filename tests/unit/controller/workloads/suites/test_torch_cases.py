"""Suites of flows that start from PyTorch, without PyTorch; see tests/frameworks/executorch for the rest."""

from __future__ import annotations

import importlib.util

import pytest

from hil.controller.models.flows.flow_registry import load_flows
from hil.controller.storage.cache import Cache
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.cases.sources import open_suite
from hil.controller.workloads.suites.cases.torch_cases import starts_from_torch
from hil.controller.workloads.suites.request import SuiteRequest
from hil.core.install_hints import make_install_command
from hil.errors import UsageError


def test_executorch_flows_start_from_torch():
    found = {name for name, flow in load_flows().items() if starts_from_torch(flow)}
    assert {"executorch-portable", "xnnpack"} <= found
    assert not {"iree", "onnxruntime"} & found


def test_int8_flows_have_recipe():
    known = load_flows()
    assert [bool(known[name].recipe) for name in ("xnnpack", "xnnpack-static-int8-per-channel")] == [False, True]


@pytest.mark.skipif(importlib.util.find_spec("executorch") is not None, reason="executorch is installed here")
@pytest.mark.parametrize("suite", ["@operators", "@models"])
def test_missing_executorch_error_names_extra(suite, isolated, tmp_path):
    with pytest.raises(UsageError, match="requires executorch, which is not installed") as refused:
        open_suite(SuiteRequest(suite), load_flows()["xnnpack"], RunContext(Cache(tmp_path), isolated))
    assert refused.value.hint == make_install_command("executorch")
