"""Profiles of real runs, created by the tools of the runtimes on this machine."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.backends.compilers import compile_model
from hil.controller.models.importers import import_model
from hil.core.results import Artifact, Model
from hil.formats.iree_command import PROFILE_TOOL, own_tool, profile_command

HOST = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)


@dataclass(frozen=True)
class Profiled:
    """A model, its program, and the profile of some runs."""

    model: Model
    artifact: Artifact
    profile: Path


def profile_iree(
    path: Path, folder: Path, settings: dict[str, Any], *, device: str = "local-task", runs: int = 5, **dims: int
) -> Profiled:
    """Compile a model and run it under IREE's profiler. All inputs are ones.

    Args:
        path: the model.
        folder: directory of the profile ``profile.ireeprof``.
        settings: the fixture of that name.
        device: ``local-task`` or ``local-sync``.
        runs: number of runs.
        dims: sizes of symbolic dimensions.
    """
    from hil.formats.iree_values import format_mlir_type

    model = import_model(path, dims=dims, isolated=settings["isolated"])
    artifact = compile_model(model, compiler="iree", runtime="iree", flags=list(HOST), debug_ir=None, **settings)
    tool = own_tool(PROFILE_TOOL)
    assert tool is not None
    assert model.inputs is not None
    types = [format_mlir_type(spec).removeprefix("tensor<").removesuffix(">") for spec in model.inputs]
    profile = folder / "profile.ireeprof"
    command = profile_command(
        str(tool),
        str(artifact.files[artifact.main]),
        device=device,
        function=artifact.function,
        inputs=[f"{kind}=1" for kind in types],
        weights=(),
        runs=runs,
        output=str(profile),
    )
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return Profiled(model, artifact, profile)


def profile_onnxruntime(path: Path, folder: Path, runs: int = 4) -> Path:
    """Run a model in an ONNX Runtime session with profiling. All inputs are ones. Return the file of the profile."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "pass")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {each.name: np.ones([int(size) for size in each.shape], np.float32) for each in session.get_inputs()}
    for _ in range(runs):
        session.run(None, feeds)
    return Path(session.end_profiling()).rename(folder / "onnxruntime.json")
