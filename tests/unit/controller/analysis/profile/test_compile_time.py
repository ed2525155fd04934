from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models import DIGITS
from support.profiles import HOST

from hil.controller.analysis.profile.compilation.compile_time import (
    DISPATCHES,
    EXECUTABLES,
    PASSES,
    CompileProfile,
    profile_compile,
)
from hil.controller.models.compiling import IREE_PHASES
from hil.controller.models.importers import import_model
from hil.core.clock import get_time_ns
from hil.core.results import Model
from hil.core.timeline import Span
from hil.errors import CompileFailed, StageTimeout, StorageError, UsageError


def digits(settings: dict[str, Any]) -> Model:
    return import_model(DIGITS / "digits_cnn.onnx", isolated=settings["isolated"])


def profile(
    model: Model, folder: Path, settings: dict[str, Any], flags: Sequence[str] = HOST, **options: Any
) -> CompileProfile:
    given = {name: settings[name] for name in ("cache", "isolated", "timeout", "log")}
    return profile_compile(model, **{"runtime": "iree", "flags": flags, "folder": folder, **given, **options})


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def inside(span: Span, outer: Span) -> bool:
    return outer.start_ns <= span.start_ns and span.end_ns <= outer.end_ns


def test_profile_lists_phases_passes_dispatches_executables(settings: dict[str, Any], tmp_path: Path) -> None:
    before = get_time_ns()
    told = profile(digits(settings), tmp_path / "out" / "deep", settings)
    after = get_time_ns()
    assert told.folder == tmp_path / "out" / "deep"
    assert not told.notes

    rows = table(told.folder / PASSES)
    phases = [row for row in rows if row["depth"] == "0"]
    assert [row["phase"] for row in phases] == ["import", "read", *IREE_PHASES[1:], "write"]
    assert "LLVMCPULowerExecutableTargetPass" in {row["pass"] for row in rows if row["phase"] == "executable-targets"}
    assert all(float(row["wall_ms"]) >= 0 for row in rows)

    whole, *rest = told.spans
    assert whole.name == "compile digits_cnn"
    assert before <= whole.start_ns < whole.end_ns <= after
    measured = [span for span in rest if not span.args]
    assert [span.name for span in measured] == [row["phase"] for row in phases]
    for span, row in zip(measured, phases, strict=True):
        assert inside(span, whole)
        assert (span.end_ns - span.start_ns) / 1e6 == pytest.approx(float(row["wall_ms"]), abs=1e-3)
    assert sum(span.end_ns - span.start_ns for span in measured) <= whole.end_ns - whole.start_ns

    dispatches = table(told.folder / DISPATCHES)
    assert [row["onnx_nodes"] for row in dispatches] == ["conv1", "conv1;relu1", "pool1", "conv2;relu2", "pool2", "fc1"]
    assert all(int(row["source_bytes"]) > 1000 for row in dispatches)
    conv = dispatches[3]
    assert conv["bound_estimate"] == "memory"
    assert float(conv["flops_per_byte_estimate"]) == pytest.approx(
        int(conv["flops_estimate"]) / int(conv["bytes_estimate"]), abs=1e-3
    )

    # The time of a nominal core, and the share of all operations' together.
    assert float(conv["time_us_estimate"]) == pytest.approx(int(conv["bytes_estimate"]) / 1e3)
    assert sum(float(row["share_estimate"]) for row in dispatches) == pytest.approx(1, abs=1e-3)
    assert [span.name for span in told.operations] == ["conv1", "conv1, relu1", "pool1", "conv2, relu2", "pool2", "fc1"]
    assert (told.operations[0].start_ns, told.operations[-1].end_ns) == (whole.start_ns, pytest.approx(whole.end_ns))
    longest = max(told.operations, key=lambda span: span.end_ns - span.start_ns)
    share = (longest.end_ns - longest.start_ns) / (whole.end_ns - whole.start_ns)
    assert longest.name == "conv2, relu2" and share == pytest.approx(float(conv["share_estimate"]), abs=1e-3)

    executables = table(told.folder / EXECUTABLES)
    assert executables[0]["executable"].endswith(".so")
    assert sum(float(row["share_of_program"]) for row in executables) == pytest.approx(1, abs=1e-3)


@pytest.mark.ci
def test_profile_spans_nest(settings: dict[str, Any], tmp_path: Path) -> None:
    open_spans: list[Span] = []
    for span in profile(digits(settings), tmp_path, settings).spans:
        while open_spans and span.start_ns >= open_spans[-1].end_ns:
            open_spans.pop()
        assert not open_spans or inside(span, open_spans[-1]), span
        open_spans.append(span)


@pytest.mark.ci
def test_profile_preserves_ratio_of_parallel_passes(settings: dict[str, Any], tmp_path: Path) -> None:
    told = profile(digits(settings), tmp_path, settings)
    # The compiler reports the pipeline of this pass after the pass, not inside it.
    outer = next(span for span in told.spans if span.name == "AutoInputConversionPipelinePass")
    inner = next(span for span in told.spans if span.start_ns == outer.end_ns)
    lengths = [span.end_ns - span.start_ns for span in (outer, inner)]
    assert float(outer.args["wall ms"]) / float(inner.args["wall ms"]) == pytest.approx(
        lengths[0] / lengths[1], rel=0.1
    )


def test_profile_of_onnxruntime_reports_session_time(settings: dict[str, Any], tmp_path: Path) -> None:
    told = profile(digits(settings), tmp_path, settings, (), runtime="onnxruntime")
    assert [span.name for span in told.spans][1:] == ["model_loading_uri", "session_initialization"]
    assert "does not compile: the phases" in told.notes[0]
    assert table(tmp_path / DISPATCHES)[0]["dispatch"] == "conv1"
    assert len(table(tmp_path / PASSES)) == 2


def test_profile_accepts_mlir_model(settings: dict[str, Any], tmp_path: Path) -> None:
    module = tmp_path / "model.mlir"
    module.write_text(
        "func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {\n"
        "  %0 = arith.addf %a, %a : tensor<4xf32>\n  return %0 : tensor<4xf32>\n}\n"
    )
    profile(import_model(module, isolated=settings["isolated"]), tmp_path, settings)
    assert [row["onnx_nodes"] for row in table(tmp_path / DISPATCHES)] == ["line 2"]


@pytest.mark.slow
def test_profile_reports_compiler_usage_and_timeout_errors(settings: dict[str, Any], tmp_path: Path) -> None:
    model = digits(settings)
    with pytest.raises(UsageError, match="--no-such-flag"):
        profile(model, tmp_path, settings, [*HOST, "--no-such-flag"])
    with pytest.raises(CompileFailed, match="no-such-cpu"):
        profile(model, tmp_path, settings, [*HOST[:2], "--iree-llvmcpu-target-cpu=no-such-cpu"])
    with pytest.raises(StageTimeout, match="compiling"):
        profile(model, tmp_path, settings, timeout=1e-6)
    with pytest.raises(UsageError, match="cannot profile the compilation of a precompiled model"):
        profile(replace(model, format="vmfb"), tmp_path, settings)


def test_profile_reports_compiler_error_text(settings: dict[str, Any], tmp_path: Path) -> None:
    module = tmp_path / "model.mlir"
    module.write_text(
        "func.func private @nowhere(%a: tensor<4xf32>) -> tensor<4xf32>\n"
        "func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {\n"
        "  %0 = func.call @nowhere(%a) : (tensor<4xf32>) -> tensor<4xf32>\n  return %0 : tensor<4xf32>\n}\n"
    )
    model = import_model(module, isolated=settings["isolated"])
    with pytest.raises(CompileFailed) as caught:
        profile(model, tmp_path / "out", settings, [*HOST, "--iree-input-type=tosa"])
    assert "nowhere" in caught.value.message + caught.value.detail
    assert not (tmp_path / "out").exists()


def test_profile_reports_unwritable_directory(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write the compile-time profile to"):
        profile(digits(settings), tmp_path / "file" / "out", settings, (), runtime="onnxruntime")
