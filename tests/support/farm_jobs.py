"""Small jobs for a farm with known results: bundles that pass, mismatch and crash, a bad model, and a generation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite
from hil.controller.farm.job_files import pack_run
from hil.controller.farm.messages import JobSpec, Kind
from hil.controller.models.importers import import_model
from hil.controller.pipeline.settings.options import Job
from hil.core.files import digest_file
from hil.core.results import Artifact
from hil.core.tensors import TensorSpec
from support.step_programs import save_summing_model

# The second program reads so far beyond its input that its worker is killed.
_SUM = """
func.func @main(%a: tensor<4xi32>, %b: tensor<4xi32>) -> tensor<4xi32> {
  %0 = arith.addi %a, %b : tensor<4xi32>
  return %0 : tensor<4xi32>
}
"""
_FAR = """
func.func @main(%a: tensor<4xi32>, %b: tensor<4xi32>) -> tensor<4xi32> {
  %empty = tensor.empty() : tensor<4xi32>
  %0 = linalg.generic {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]}
      ins(%b : tensor<4xi32>) outs(%empty : tensor<4xi32>) {
  ^bb0(%index: i32, %old: i32):
    %factor = arith.constant 1000000000 : i64
    %wide = arith.extsi %index : i32 to i64
    %far = arith.muli %wide, %factor : i64
    %at = arith.index_cast %far : i64 to index
    %value = tensor.extract %a[%at] : tensor<4xi32>
    linalg.yield %value : i32
  } -> tensor<4xi32>
  return %0 : tensor<4xi32>
}
"""
_FLAGS = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=generic",
)
_SPECS = tuple(TensorSpec(name, "int32", (4,)) for name in ("a", "b"))
_OUT = (TensorSpec("out", "int32", (4,)),)


@dataclass(frozen=True)
class KnownJob:
    """Job with a known result on all boards, after any number of attempts.

    Attributes:
        kind: name of the kind.
        spec: specification to submit.
        files: digest -> file to upload first.
        exit_code, outcome: expected result.
    """

    kind: str
    spec: JobSpec
    files: dict[str, Path]
    exit_code: int
    outcome: str


def known_jobs(folder: Path) -> dict[str, KnownJob]:
    """Return a job of each kind: pass, mismatch, crash, compile, generate."""
    return {one.kind: one for one in _jobs(folder)}


def _jobs(folder: Path) -> Iterator[KnownJob]:
    a, b = np.arange(4, dtype=np.int32), np.full(4, 2, np.int32)
    yield _bundle_job(folder, "pass", _SUM, b, a + b, 0, "PASS")
    yield _bundle_job(folder, "mismatch", _SUM, b, a, 1, "FAIL")
    yield _bundle_job(folder, "crash", _FAR, b, a, 3, "RUN_CRASH")
    model = folder / "odd.onnx"
    _write_odd_model(model)
    digest = digest_file(model)
    spec = JobSpec(Kind.RUN, {"models": ["model/odd.onnx"]}, {"model/odd.onnx": digest})
    yield KnownJob("compile", spec, {digest: model}, 3, "COMPILE_ERROR")
    decoder, prompts = save_summing_model(folder / "decoder.onnx"), folder / "generate.toml"
    prompts.write_text("[[prompt]]\ntokens = [1, 4, 2]\nforced = [5, 0]\n")
    job = Job((decoder,), generate=prompts, runtime="onnxruntime")
    spec, files = pack_run(job, import_model(decoder))
    yield KnownJob("generate", spec, files.list_uploads(), 0, "PASS")


def _write_odd_model(path: Path) -> None:
    """Write a model with an unknown operator, which the compiler rejects."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="com.example")
    graph = helper.make_graph([node], "odd", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


def _bundle_job(
    folder: Path, kind: str, source: str, b: np.ndarray, expected: np.ndarray, exit_code: int, outcome: str
) -> KnownJob:
    path = folder / f"{kind}.hilb"
    mlir, vmfb = folder / f"{kind}.mlir", folder / f"{kind}.vmfb"
    mlir.write_text(source)
    compiler = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile"]
    subprocess.run([*compiler, *_FLAGS, str(mlir), "-o", str(vmfb)], check=True)
    program = Artifact(
        "iree", vmfb.name, {vmfb.name: vmfb}, {vmfb.name: digest_file(vmfb)}, "main", "iree", _FLAGS, _SPECS, _OUT
    )
    case = MethodTestCase([np.arange(4, dtype=np.int32), b], [expected])
    Bundle.create(program, [MethodTestSuite("main", [case])]).save(path)
    digest, at = digest_file(path), f"bundle/{path.name}"
    spec = JobSpec(Kind.BUNDLE, {"models": [at], "methods": []}, {at: digest}, affinity=digest)
    return KnownJob(kind, spec, {digest: path}, exit_code, outcome)
