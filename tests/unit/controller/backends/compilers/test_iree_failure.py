from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from hil.controller.backends.compilers import compile_model
from hil.controller.backends.compilers.iree_failure import IR, PASS, SCRIPT
from hil.controller.backends.compilers.iree_program import fail
from hil.controller.models.compiling import CompileOrder, call_isolated, report_phase
from hil.controller.models.importers import import_model
from hil.controller.storage.isolation.isolated import IsolatedCrash
from hil.errors import CompileCrashed, CompileFailed, StageError, StageTimeout, UsageError

pytestmark = pytest.mark.ci

Save = Callable[..., Path]
HOST = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
HOST += ["--iree-llvmcpu-target-cpu=host"]
# The node test castlike_FLOAT_to_INT4 of the package onnx.
CAST = """
func.func @main(%a: !torch.vtensor<[5,5],f32>, %b: !torch.vtensor<[0],si4>) -> !torch.vtensor<[5,5],si4>
    attributes {torch.onnx_meta.ir_version = 13 : si64, torch.onnx_meta.opset_version = 25 : si64} {
  %0 = torch.operator "onnx.CastLike"(%a, %b)
      : (!torch.vtensor<[5,5],f32>, !torch.vtensor<[0],si4>) -> !torch.vtensor<[5,5],si4>
  return %0 : !torch.vtensor<[5,5],si4>
}
"""
CUSTOM = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = stablehlo.custom_call @foo(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
"""
# IREE folds constants at compile time on one core, which takes minutes here.
FOLDED = """
func.func @main(%x: tensor<256x256xf32>) -> tensor<256x256xf32> {
  %a = arith.constant dense<1.5> : tensor<256x8000000xf32>
  %b = arith.constant dense<2.5> : tensor<8000000x256xf32>
  %c = stablehlo.dot %a, %b : (tensor<256x8000000xf32>, tensor<8000000x256xf32>) -> tensor<256x256xf32>
  %y = stablehlo.add %x, %c : tensor<256x256xf32>
  return %y : tensor<256x256xf32>
}
"""
ADD = "func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {\n %0 = arith.addf %a, %a : tensor<4xf32>\n"
ADD += " return %0 : tensor<4xf32>\n}\n"


def failing(path: Path, settings: dict[str, Any], kind: type[StageError], *flags: str, **more: Any) -> Any:
    """Compile a model that fails; return the error and the failure directory."""
    model = import_model(path, isolated=settings["isolated"])
    order: Any = {"runtime": "iree", "flags": [*HOST, *flags], "debug_ir": None, **settings, **more}
    with pytest.raises(kind) as caught:
        compile_model(model, compiler="iree", **order, failure=path.parent / "failure")
    return caught.value, path.parent / "failure"


def run_script(folder: Path, *words: str, limit: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run the reproducer script after moving its directory."""
    moved = shutil.move(folder, folder.with_name(f"moved{len(words)}"))
    quick = os.environ | {"LLVM_DISABLE_SYMBOLIZATION": "1"}
    command = ["sh", f"{moved}/{SCRIPT}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=quick)
    shutil.move(moved, folder)
    return done


def test_compiler_crash_reports_pass_and_writes_reproducer(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "cast.mlir").write_text(CAST)
    error, kept = failing(tmp_path / "cast.mlir", settings, CompileCrashed)
    assert (
        "SIGABRT: Unhandled type" in error.message and "in ConvertTorchOnnxToTorch on func.func @main" in error.message
    )
    assert error.detail.startswith("phase: input\npass: ConvertTorchOnnxToTorch on func.func @main\n")
    assert f"sh {kept / SCRIPT}" in error.hint
    assert 'pipeline: "builtin.module(func.func(convert-torch-onnx-to-torch' in (kept / PASS).read_text()
    for words in ((), ("pass",)):
        again = run_script(kept, *words)
        assert again.returncode == 250 and "Unhandled type in getScalarTypeForType" in again.stderr
    assert "iree-opt --run-reproducer" in (kept / SCRIPT).read_text()


def test_compiler_failure_reports_pass_and_writes_reproducer(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "custom.mlir").write_text(CUSTOM)
    error, kept = failing(tmp_path / "custom.mlir", settings, CompileFailed)
    assert "failed to legalize operation 'stablehlo.custom_call'" in error.message
    assert "ConvertStableHloToIreeInputDialects" not in error.message
    assert "pass: ConvertStableHloToIreeInputDialects on builtin.module" in error.detail
    for words in ((), ("pass",)):
        again = run_script(kept, *words)
        assert again.returncode == 1 and "failed to legalize operation 'stablehlo.custom_call'" in again.stderr


def test_backend_crash_leaves_ir_of_earlier_phases(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "add.mlir").write_text(ADD)
    error, kept = failing(tmp_path / "add.mlir", settings, CompileCrashed, "--opt-pipeline-trigger-crash")
    assert "of the phase hal" in error.message and "SerializeTargetExecutablesPass on hal.executable" in error.message
    assert 'LLVM: Running pass "function(trigger-crash-function)"' in error.detail
    phases = [path.name.split(".")[-2] for path in (kept / IR).iterdir()]
    assert {"input", "flow", "stream", "executable-targets"} <= set(phases) and "hal" not in phases
    # The pass dies of the flag: iree-opt needs it too.
    assert "trigger-crash" in run_script(kept, "pass").stderr


def test_failure_report_uses_cache_on_second_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "custom.mlir").write_text(CUSTOM)
    first, kept = failing(tmp_path / "custom.mlir", settings, CompileFailed)
    (kept / IR).mkdir()
    (kept / IR / "old").touch()
    again, _ = failing(tmp_path / "custom.mlir", settings, CompileFailed)
    assert again.detail == first.detail and (kept / SCRIPT).exists() and not (kept / IR).exists()
    assert len(settings["cache"].ls()) == 1


def test_importer_failure_reproduces_with_iree_import_onnx(save_onnx: Save, settings: dict[str, Any]) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT4E2M1)
    last = helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT)
    path = save_onnx([node, last], [("x", TensorProto.FLOAT, (4,))], [("z", TensorProto.FLOAT, (4,))])
    error, kept = failing(path, settings, CompileFailed)
    assert error.detail.startswith("phase: import\niree-import-onnx: ")
    again = run_script(kept)
    assert again.returncode != 0 and "iree-import-onnx model.onnx" in (kept / SCRIPT).read_text()


@pytest.mark.slow
def test_compiler_timeout_reports_current_pass(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "folded.mlir").write_text(FOLDED)
    error, kept = failing(tmp_path / "folded.mlir", settings, StageTimeout, timeout=5.0)
    assert "in JitGlobalsPass on builtin.module of the phase global-optimization" in error.message
    assert (kept / PASS).exists() and '[ "$1" != pass ]' in (kept / SCRIPT).read_text()
    with pytest.raises(subprocess.TimeoutExpired):
        run_script(kept, "pass", limit=5.0)


def test_debug_ir_passes_writes_ir_by_pass(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "add.mlir").write_text(ADD)
    model = import_model(tmp_path / "add.mlir", isolated=settings["isolated"])
    order: CompileOrder = {"runtime": "iree", "flags": HOST, "debug_ir": tmp_path / "ir", **settings}
    artifact = compile_model(model, compiler="iree", **order, debug_ir_passes=True)
    passes = [path.name for path in (tmp_path / "ir" / "passes").rglob("*.mlir")]
    assert any("iree-stream-conversion" in name for name in passes) and (tmp_path / "ir" / "phases").is_dir()
    plain = compile_model(model, compiler="iree", **{**order, "debug_ir": None, "recompute": True})
    assert artifact.files[artifact.main].read_bytes() == plain.files[plain.main].read_bytes()


def test_debug_ir_passes_needs_compiler_support(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "add.mlir").write_text(ADD)
    model = import_model(tmp_path / "add.mlir", isolated=settings["isolated"])
    order: Any = {"runtime": "iree", "flags": (), "debug_ir": tmp_path / "ir", **settings, "debug_ir_passes": True}
    with pytest.raises(UsageError, match="the compiler none does not support --debug-ir-passes"):
        compile_model(model, compiler="none", **order)


class DyingPool:
    """A worker that prints the given phases and crashes."""

    def call(self, function: Any, phases: list[str], *, timeout: float | None, log: Path) -> None:
        with log.open("a") as file, contextlib.redirect_stdout(file):
            for phase in phases:
                report_phase(phase)
        raise IsolatedCrash("the worker process died of SIGSEGV", detail="the end of its log")


def test_compiler_crash_reports_last_entered_phase(tmp_path: Path) -> None:
    how: Any = {"isolated": DyingPool(), "timeout": None, "log": tmp_path / "compile.log"}
    for phases, detail in ((["load", "lower"], "phase: lower\nthe end of its log"), ([], "the end of its log")):
        with pytest.raises(IsolatedCrash) as caught:
            call_isolated("a:b", phases, how)
        assert caught.value.detail == detail


# Errors of iree-compile 3.13 for Vulkan, without the target's attributes.
_BACKEND = 'for backend #hal.executable.target<"vulkan-spirv", "vulkan-spirv-fb", {iree_codegen.target_info = #x}>'
_INT64 = f"""<unknown>:0: error: loc("Div_0"): failed to legalize operation 'arith.divsi': %1 = (i64, i64) -> i64
<unknown>:0: error: loc("Div_0"): failed to run translation of source executable to target executable {_BACKEND}
"""
_FLOAT64 = f"""<unknown>:0: error: loc("Mul_0"): failed to convert SPIR-V type: 'memref<?xf64>'
<unknown>:0: error: loc("Mul_0"): failed to run translation of source executable to target executable {_BACKEND}
"""


@pytest.mark.parametrize(
    ("printed", "hint"),
    [
        (_INT64, "--compile-flag=--iree-input-demote-i64-to-i32"),
        (_FLOAT64, "a Vulkan program has only the types that the device reports"),
        (_INT64.replace("vulkan-spirv", "llvm-cpu"), ""),
    ],
)
def test_types_that_vulkan_lacks_are_explained(printed, hint):
    with pytest.raises(CompileFailed) as caught:
        fail(1, printed)
    assert hint in caught.value.hint and bool(hint) == bool(caught.value.hint)
    assert "iree_codegen" not in caught.value.message
    assert ('for backend "vulkan-spirv"' in caught.value.message) == bool(hint)
