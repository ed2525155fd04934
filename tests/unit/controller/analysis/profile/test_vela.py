"""Estimates of Vela: its tables and warnings, and the ticks next to them."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.made_profiles import profile
from support.models import DIGITS

from hil.controller.analysis.profile.ticks import vela
from hil.controller.analysis.profile.ticks.matching import add_ticks
from hil.controller.analysis.profile.ticks.vela import ACCELERATORS, estimate_cycles
from hil.controller.cli.main import cli
from hil.controller.records.commands.npu import NpuEstimate, NpuOperator
from hil.core.install_hints import make_install_command
from hil.core.timeline import OpTicks, Ticks
from hil.errors import CompileFailed, UsageError

TFLITE = DIGITS.parent / "tflite"
needs_vela = pytest.mark.skipif(find_spec("ethosu") is None, reason="needs Vela: pip install 'hil[vela]'")
HEADER = "Original Operator,NNG Operator,Target,Op Cycles,MAC Count,Name"
ROWS = """\
Conv2D,Conv2D,NPU,492,2592,c1
Conv2D,Relu,NPU,0,0,c1
Conv2D,Conv2D,NPU,100,1000,c2
Softmax,MaxPool,NPU,134,10,c2_softmax_0
Softmax,Add,NPU,80,0,c2_softmax_26_broadcasted
Softmax,Asr,NPU,18,0,s
Mean,Passthrough,CPU,0,0,m"""
PRINTED = """\
Warning (supported operators) operator: MEAN, ofm: 'm'
Reason: Product of reduced axes must be no greater than 65536
        Axis is 70000
 - second line

Warning: unrelated
"""
SUMMARY = """\
system_config,memory_mode,core_clock,sram_memory_used,cycles_total
High_End,Shared_Sram,500000000.0,1.5,824"""


@pytest.fixture
def fake_vela(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Vela by a function that writes the tables above."""

    def run(model: Path, accelerator: str, folder: Path) -> str:
        (folder / f"{model.stem}_per-layer.csv").write_text(f"{HEADER}\n{ROWS}\n")
        (folder / f"{model.stem}_summary_High_End.csv").write_text(f"{SUMMARY}\n")
        return PRINTED

    monkeypatch.setattr(vela, "_run_vela", run)
    monkeypatch.setattr(vela, "require_version", lambda *_: "5.2.0")


def operator(name: str, op_type: str) -> NpuOperator:
    return NpuOperator(name=name, op_type=op_type, device="npu", cycles=1, share=0.5, macs=1, reason="")


def estimate(*operators: NpuOperator) -> NpuEstimate:
    return NpuEstimate(
        **{"model": "m", "vela": "5.2.0", "accelerator": "ethos-u55-128", "system_config": "s", "memory_mode": "m"},
        **{"clock_hz": 5e8, "cycles": 2, "npu_operators": 2, "cpu_operators": 0, "sram_bytes": 1},
        operators=list(operators),
    )


def ticks(**nodes: tuple[str, str, float]) -> Any:
    """Return a profile of dispatches: name -> node, operator, ticks."""
    made = [
        OpTicks(name, "compute", (node,), (op_type,), 1, p50, int(p50), int(p50), 0.1)
        for name, (node, op_type, p50) in nodes.items()
    ]
    return profile(ticks=Ticks(3, 1.25, 100.0, tuple(made)))


def test_estimate_merges_rows_of_an_operator(fake_vela: None) -> None:
    found = estimate_cycles(TFLITE / "digits_int8.tflite", "ethos-u55-128")
    assert [(one.name, one.op_type, one.device, one.cycles, one.macs) for one in found.operators] == [
        ("c1", "Conv2D", "npu", 492, 2592),
        ("c2", "Conv2D", "npu", 100, 1000),
        ("s", "Softmax", "npu", 232, 10),
        ("m", "Mean", "cpu", None, 0),
    ]
    assert (found.cycles, found.sram_bytes, found.npu_operators, found.cpu_operators) == (824, 1536, 3, 1)
    assert sum(one.share or 0 for one in found.operators) == pytest.approx(1)


def test_estimate_has_reason_for_each_operator_on_the_cpu(fake_vela: None) -> None:
    found = estimate_cycles(TFLITE / "digits_int8.tflite", "ethos-u55-128")
    expected = "Product of reduced axes must be no greater than 65536; Axis is 70000; - second line"
    assert [one.reason for one in found.operators] == ["", "", "", expected]


def test_estimate_reports_unknown_output_of_vela(fake_vela: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HEADER", HEADER.replace("Op Cycles", "Cycles"))
    with pytest.raises(CompileFailed, match=r"unsupported output of Vela 5\.2\.0"):
        estimate_cycles(TFLITE / "digits_int8.tflite", "ethos-u55-128")


@pytest.mark.parametrize("summary", [SUMMARY.splitlines()[0], "", SUMMARY.replace("824", "inf")])
def test_estimate_reports_unusable_summary(summary: str, fake_vela: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SUMMARY", summary)
    with pytest.raises(CompileFailed, match=r"unsupported output of Vela 5\.2\.0"):
        estimate_cycles(TFLITE / "digits_int8.tflite", "ethos-u55-128")


def test_name_of_model_may_contain_wildcards(fake_vela: None, tmp_path: Path) -> None:
    model = tmp_path / "net[8*8].tflite"
    model.write_bytes((TFLITE / "digits_int8.tflite").read_bytes())
    assert estimate_cycles(model, "ethos-u55-128").cycles == 824


def test_estimate_rejects_other_formats() -> None:
    with pytest.raises(UsageError, match="Vela accepts only TFLite models") as caught:
        estimate_cycles(DIGITS / "digits_cnn.onnx", "ethos-u55-128")
    assert "int8 TFLite file" in caught.value.hint


def test_missing_vela_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vela, "PACKAGE", "ethos-u-vela-missing")
    with pytest.raises(UsageError, match="not installed") as caught:
        estimate_cycles(TFLITE / "digits_int8.tflite", "ethos-u55-128")
    assert caught.value.hint == make_install_command("vela")


def test_unknown_accelerator_lists_known_ones() -> None:
    done = CliRunner().invoke(cli, ["profile", "npu", str(TFLITE / "digits_int8.tflite"), "--accelerator", "u55"])
    assert isinstance(done.exception, UsageError)
    assert "unknown accelerator 'u55'" in done.exception.message
    assert all(name in done.exception.hint for name in ACCELERATORS)


def test_ticks_are_matched_by_name_with_longest_prefix() -> None:
    measured = ticks(a=("conv;bias_prequant", "Conv", 7.0), b=("conv__12", "Conv", 5.0), c=("other", "Relu", 1.0))
    found = add_ticks(estimate(operator("conv", "Conv2D"), operator("conv;bias", "Conv2D")), measured)
    assert [(one.ticks, one.dispatches) for one in found.operators] == [(5.0, ("b",)), (7.0, ("a",))]
    assert (found.matched_by, found.unmatched, found.instructions_per_tick) == ("name", ("c",), 1.25)


def test_ticks_are_matched_by_order_of_each_kind() -> None:
    measured = ticks(a=("conv1", "Conv", 7.0), b=("fc", "Gemm", 5.0), c=("conv2", "Conv", 1.0))
    operators = [operator("x", "Conv2D"), operator("y", "DepthwiseConv2D"), operator("z", "FullyConnected")]
    found = add_ticks(estimate(*operators), measured)
    assert [one.ticks for one in found.operators] == [7.0, 1.0, 5.0]
    assert (found.matched_by, found.unmatched) == ("order", ())


def test_models_of_different_structure_are_not_matched() -> None:
    measured = ticks(a=("conv1", "Conv", 7.0), b=("fc", "Gemm", 5.0))
    operators = [operator("x", "Conv2D"), operator("y", "Conv2D"), operator("z", "FullyConnected")]
    found = add_ticks(estimate(*operators), measured)
    assert [one.ticks for one in found.operators] == [None] * 3
    assert (found.matched_by, found.unmatched) == ("", ("a", "b"))


def test_profile_without_ticks_is_rejected() -> None:
    with pytest.raises(UsageError, match="has no ticks"):
        add_ticks(estimate(operator("x", "Conv2D")), profile())


def test_output_labels_cycles_as_estimates(fake_vela: None) -> None:
    done = CliRunner().invoke(cli, ["profile", "npu", str(TFLITE / "digits_int8.tflite")], catch_exceptions=False)
    text = " ".join(done.output.split())
    assert "on ethos-u55-128, estimated by Vela 5.2.0" in text
    assert "est. cycles" in text and "estimate 824 NPU cycles" in text
    assert "Mean m stays on the CPU: Product of reduced axes" in text


@needs_vela
def test_vela_estimates_an_int8_model() -> None:
    words = ["profile", "npu", str(TFLITE / "digits_int8.tflite"), "--json", "--accelerator", "ethos-u55-256"]
    document = json.loads(CliRunner().invoke(cli, words, catch_exceptions=False).output)
    assert [one["op_type"] for one in document["operators"]] == ["Conv2D", "MaxPool", "FullyConnected", "Softmax"]
    assert document["accelerator"] == "ethos-u55-256" and document["vela"].startswith("5.2")
    assert document["cycles"] > 1000
    assert all(one["device"] == "npu" and one["cycles"] > 0 for one in document["operators"])


@needs_vela
def test_vela_reports_why_operators_stay_on_the_cpu() -> None:
    found = estimate_cycles(TFLITE / "digits.tflite", "ethos-u55-128")
    assert found.cpu_operators == len(found.operators) == 5
    assert all("unsupported DataType Float32" in one.reason for one in found.operators)


@needs_vela
def test_vela_rejects_a_damaged_model(tmp_path: Path) -> None:
    (tmp_path / "bad.tflite").write_bytes((TFLITE / "digits.tflite").read_bytes()[:900])
    with pytest.raises(CompileFailed, match=r"Vela rejected bad\.tflite"):
        estimate_cycles(tmp_path / "bad.tflite", "ethos-u55-128")
