"""The log of ONNX Runtime contains why a provider did not run nodes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from support.models import save_model

from hil.agent.runtimes import onnxruntime_log
from hil.agent.runtimes.onnxruntime_log import ProviderLog, parse_log, read_provider_log
from hil.agent.runtimes.onnxruntime_providers import ProviderDevice

# Captured with onnxruntime-qnn 2.7 (HTP simulator), onnxruntime-openvino 1.24 and onnxruntime-gpu 1.31 without CUDA.
LOGS = Path(__file__).parent / "provider_logs"
HEAD = "2026-11-30 21:31:44.006415179 [{}:onnxruntime:, file.cc:817 GetCapability] {}"


def read_captured(name: str) -> ProviderLog:
    return parse_log((LOGS / name).read_text().splitlines())


def test_parse_log_reads_reasons_of_qnn():
    assert read_captured("qnn.log").reasons == {
        ("uniq", "Unique"): "Operators of type `Unique` are not supported by QNN EP.Unique node `uniq` will not be "
        "assigned to QNN EP.",
        ("neg", "Neg"): "Cannot get shape",
    }


def test_parse_log_invents_no_reason():
    found = read_captured("openvino.log")
    assert (found.reasons, found.errors) == ({}, [])
    assert found.find_reason("uniq", "Unique") == ""


def test_parse_log_reads_error_of_missing_library():
    (error,) = read_captured("cuda_unavailable.log").errors
    assert error == (
        "Failed to load library /opt/python/onnxruntime/capi/libonnxruntime_providers_cuda.so with error: "
        "libcublasLt.so.13: cannot open shared object file: No such file or directory"
    )


@pytest.mark.parametrize(
    ("text", "node", "why"),
    [
        # From ONNX Runtime's own tests of its JavaScript provider.
        (
            "webgpu kernel not found in registries for Op type: PRelu node name: /1/PRelu",
            ("/1/PRelu", "PRelu"),
            "webgpu kernel not found in registries",
        ),
        (
            "CUDA kernel not found in registries for Op type: GridSample",
            ("", "GridSample"),
            "CUDA kernel not found in registries",
        ),
        (
            "ORT optimization- Force fallback to CPU execution for node: Gather_17 because the CPU execution path is "
            "deemed faster than overhead involved with execution on other EPs  capable of executing this node",
            ("Gather_17", "Gather"),
            "Force fallback to CPU execution because the CPU execution path is deemed faster than overhead involved "
            "with execution on other EPs  capable of executing this node",
        ),
        (
            "Operator type: [Erf] index: [4] name: [erf] supported: [0]",
            ("erf", "Erf"),
            "the provider's check returned `supported: [0]`",
        ),
        (
            "Node supported: [0] index: [4] name: [erf] Operator type: [Erf] as part of the NodeUnit type: [Erf]",
            ("erf", "Erf"),
            "the provider's check returned `supported: [0]`",
        ),
    ],
)
def test_parse_log_reads_reasons_of_providers(text, node, why):
    found = parse_log([HEAD.format("I", text)])
    assert found.find_reason(*node) == why
    assert found.find_reason("other", "Other") == ""


def test_parse_log_ignores_supported_nodes():
    supported = "Operator type: [Erf] index: [4] name: [erf] supported: [1]"
    assert not parse_log([HEAD.format("V", supported), "\tREASON : of no message"]).reasons


def test_parse_log_reports_all_reasons_of_nodes_without_name():
    checks = [("", "no shape"), ("", "no type"), ("", "no shape"), ("neg", "no shape"), ("neg", "no type")]
    texts = [
        line
        for name, why in checks
        for line in (
            HEAD.format("V", "Validation FAILED for 1 nodes"),
            f"\tOperator type: Neg Node name: {name} Node index: 1",
            f"\tREASON : {why}",
        )
    ]
    assert parse_log(texts).reasons == {("", "Neg"): "no shape or: no type", ("neg", "Neg"): "no shape"}


def test_parse_log_is_bounded():
    """A model decides how many nodes the log lists, and how they are named."""
    line = HEAD.format("I", "CUDA kernel not found in registries for Op type: Erf node name: ")
    tracemalloc.start()
    found = parse_log(line + f"{number} " + "x" * 400 for number in range(12_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.reasons) == 10_000
    assert peak < 32 << 20


def test_read_provider_log_creates_a_session(tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["y"], "relu")]
    value = [TensorProto.FLOAT, [4]]
    model = save_model(tmp_path / "m.onnx", nodes, [("x", *value)], [("y", *value)])
    assert read_provider_log(model, ProviderDevice("CPUExecutionProvider"), tmp_path) == ProviderLog()
    model.write_bytes(b"invalid")
    assert not read_provider_log(model, ProviderDevice("CPUExecutionProvider"), tmp_path).reasons


def test_read_provider_log_ends_at_time_limit(tmp_path, monkeypatch):
    line = HEAD.format("E", "stuck")
    start = onnxruntime_log._START.partition("from hil")[0]
    script = f"{start}print({line!r}, file=sys.stderr, flush=True); import time; time.sleep(600)"
    monkeypatch.setattr(onnxruntime_log, "_START", script)
    assert read_provider_log(tmp_path, ProviderDevice("x"), tmp_path, seconds=2).errors == ["stuck"]
