"""Requests of suites: the flow with a different runtime, and the command that repeats a case."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hil.controller.cli.running.suite import run as suite_run
from hil.controller.workloads.suites.cases.sources import choose_flow
from hil.controller.workloads.suites.expected import Expectations
from hil.controller.workloads.suites.request import Settings, SuiteRequest
from hil.errors import UsageError


def test_runtime_replaces_runtime_compiler_and_flags_of_flow() -> None:
    flow = choose_flow(SuiteRequest("models", "iree-O3", runtime="onnxruntime"))
    assert (flow.name, flow.runtime) == ("iree-O3-onnxruntime", "onnxruntime")
    assert (flow.compiler, flow.compile_flags, flow.arithmetic) == ("", (), "")
    assert choose_flow(SuiteRequest("models", "iree-O3", runtime="iree")) == choose_flow(
        SuiteRequest("models", "iree-O3")
    )


def test_expected_failures_of_flow_do_not_apply_to_other_runtime(tmp_path: Path) -> None:
    listed = tmp_path / "expected.toml"
    listed.write_text('[[run]]\ncases = ["net"]\nflow = "iree"\noutcome = "FAIL"\nreason = "known"\n')
    expectations = Expectations.load(listed)
    own, other = (choose_flow(SuiteRequest("models", runtime=name)) for name in ("", "onnxruntime"))
    assert expectations.selects("net", own.name, "sim", own.runtime, "sim")
    assert not expectations.selects("net", other.name, "sim", other.runtime, "sim")


def test_unknown_runtime_is_usage_error() -> None:
    with pytest.raises(UsageError, match="--runtime onxruntime") as caught:
        choose_flow(SuiteRequest("models", runtime="onxruntime"))
    assert "onnxruntime" in caught.value.hint


def test_repeat_command_is_accepted_by_command_line() -> None:
    settings = Settings(compile_flags=("--iree-opt-level=O1", "plain"), input_range=(-1.0, 2.5), seed=3)
    request = SuiteRequest("models", runtime="onnxruntime", settings=settings)
    words = shlex.split(request.command("net_full_model"))
    assert words[:3] == ["hil", "suite", "run"]
    parsed = suite_run.make_context("run", words[3:]).params
    assert parsed["runtime"] == ("onnxruntime",)
    assert parsed["compile_flags"] == settings.compile_flags
    assert (parsed["input_range"], parsed["seed"]) == (settings.input_range, 3)


def test_command_of_default_flow_selects_no_flow() -> None:
    assert "--flow" not in SuiteRequest("models", is_default_flow=True).command()
    assert "--flow iree" in SuiteRequest("models", is_default_flow=True).command("net_full_model")


def test_stored_request_without_runtime_is_read() -> None:
    stored = SuiteRequest("models", settings=Settings(input_range=(0.0, 1.0))).to_json()
    assert SuiteRequest.from_json(stored).settings.input_range == (0.0, 1.0)
    del stored["runtime"], stored["settings"]["input_range"], stored["settings"]["compile_flags"]
    assert SuiteRequest.from_json(stored) == SuiteRequest("models")
