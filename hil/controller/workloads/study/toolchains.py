"""Toolchains of a study: they compile a saved training step to a program, stage by stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hil.controller.backends.compilers.iree import compile_iree
from hil.controller.backends.compilers.iree_program import PACKAGE
from hil.controller.backends.compilers.tensorflow import tfcompile
from hil.controller.devices.board_choice import fill_target
from hil.controller.models.compiling import Work
from hil.controller.models.importers import import_model
from hil.controller.models.tensorflow.hlo import HLO, write_hlo
from hil.controller.storage.cache import META, Cache
from hil.controller.storage.isolation.isolated import Isolated, convert_errors
from hil.controller.storage.runs import convert_write_errors
from hil.controller.storage.sources.packages import require_version
from hil.controller.storage.tensor_files import load_tensors
from hil.controller.workloads.study.train_build import MLIR, SIGNATURE, STEP, VALUES, lower_step
from hil.core.board_config import BoardConfig
from hil.core.files import MAX_MODEL_BYTES, read_file
from hil.core.results import Artifact, Model
from hil.core.tensors import Array
from hil.errors import CompileCrashed, CompileFailed, StageError
from hil.formats.xla_program import VALUES as TFCOMPILE_VALUES

# Experiment stages, in this order. Compilers may skip stages.
PREPARE, LOWER = "train in TensorFlow", "lower to StableHLO"
LOAD, RUN, MATCH = "load", "run", "match"
TIMEOUT_SECONDS = 1800.0
_OUTSIDE = "--variables=outside"


@dataclass(frozen=True)
class StepProgram:
    """A compiled training step."""

    artifact: Artifact
    inputs: tuple[str, ...]  # input names in order: batch, then variables as ``variable NAME``
    outputs: tuple[str, ...]  # output names in order: outputs, then variables as ``variable NAME``
    values: Mapping[str, Array]  # initial values of the variables, by the same names


@dataclass(frozen=True)
class Making:
    """Arguments of a toolchain."""

    saved: Path
    config: BoardConfig
    machine: Mapping[str, Any]
    folder: Path
    cache: Cache
    isolated: Isolated
    # Runs a stage, given name and function, and records duration and error.
    stage: Callable[[str, Callable[[], Any]], Any]

    @property
    def log(self) -> Path:
        """The compilers' log file."""
        return self.folder / "compile.log"

    def keep(self, made: Path) -> None:
        """Copy a stage's files from the cache, which may evict them.

        Skip initial values, because every step stores the inputs.
        """
        with convert_write_errors(self.folder):
            shutil.copytree(made, self.folder, ignore=lambda *_: (TFCOMPILE_VALUES, META), dirs_exist_ok=True)

    @property
    def work(self) -> Work:
        """Settings for compilers.

        Compilers with these settings ignore cached results, because a study measures compile times.
        """
        return {
            "cache": self.cache,
            "isolated": self.isolated,
            "recompute": True,
            "timeout": TIMEOUT_SECONDS,
            "log": self.log,
        }


def compile_with_tfcompile(making: Making) -> StepProgram:
    """Compile with tfcompile, in three steps."""
    # The board may have been opened for IREE.
    config, _ = fill_target(making.config, tfcompile.RUNTIME, {"machine": making.machine})
    flags = (*config.compile_flags.get("tfcompile", ()), _OUTSIDE)
    tfcompile.parse_target(flags)

    def generate() -> tuple[Model, tfcompile.Steps, Path]:
        model = import_model(making.saved, function=STEP, isolated=making.isolated, cache=making.cache)
        steps = tfcompile.Steps(model, flags, making.work, making.folder / HLO)
        return model, steps, steps.generate()

    model, steps, graph = making.stage(tfcompile.GENERATE, generate)
    making.keep(graph)
    made = making.stage(tfcompile.COMPILE, lambda: steps.compile(graph))
    making.keep(made)
    library = making.stage(tfcompile.LINK, lambda: steps.link(graph, made))
    artifact = steps.artifact(graph, library)
    signature = tfcompile.read_signature(model.function, graph)
    values = signature.values(read_file(graph / TFCOMPILE_VALUES, MAX_MODEL_BYTES))
    return StepProgram(
        artifact,
        _name_variables([spec.name for spec in artifact.inputs or ()], len(signature.inputs(variables=False))),
        tuple(spec.name for spec in artifact.outputs or ()),
        {f"variable {name}": value for name, value in values.items()},
    )


def compile_with_iree(making: Making) -> StepProgram:
    """Compile with StableHLO and IREE."""

    def lower() -> Path:
        folder = making.folder / "lowered"
        folder.mkdir(parents=True, exist_ok=True)
        arguments = {"saved": str(making.saved), "folder": str(folder)}
        call(making.isolated, lower_step, arguments, making.log)
        return folder

    folder = making.stage(LOWER, lower)
    # Also store XLA's HLO of the step, for information only, and do not measure the time.
    seen = {"path": str(making.saved), "function": STEP, "dims": {}}
    call(making.isolated, write_hlo, {**seen, "folder": str(making.folder), "log": str(making.log)}, making.log)

    def compile_module() -> Artifact:
        model = import_model(folder / MLIR, isolated=making.isolated, cache=making.cache)
        flags = making.config.compile_flags.get("iree", ())
        failure = making.folder / "compile-failure"
        return compile_iree(model, runtime="iree", flags=flags, debug_ir=None, failure=failure, **making.work)

    artifact = making.stage(tfcompile.COMPILE, compile_module)
    described = json.loads(read_file(folder / SIGNATURE))
    state = [one["spec"]["name"] for one in described["state"]]
    assigned = sorted((one for one in described["state"] if one["result"] is not None), key=lambda one: one["result"])
    return StepProgram(
        artifact,
        _name_variables([*described["inputs"], *state], len(described["inputs"])),
        _name_variables([*described["outputs"], *(one["spec"]["name"] for one in assigned)], len(described["outputs"])),
        {f"variable {name}": value for name, value in load_tensors(folder / VALUES).items()},
    )


@dataclass(frozen=True)
class Toolchain:
    """A toolchain of a study.

    ``make`` compiles a step. ``compiler`` returns the compiler's name and version, and raises UsageError if it is
    missing. ``runtime`` is the programs' runtime, and ``stages`` are the stages before the load.
    """

    make: Callable[[Making], StepProgram]
    compiler: Callable[[], str]
    runtime: str
    stages: tuple[str, ...]

    @property
    def all_stages(self) -> tuple[str, ...]:
        """All stages of an experiment."""
        return (PREPARE, *self.stages, LOAD, RUN, MATCH)


_TFCOMPILE = (tfcompile.GENERATE, tfcompile.COMPILE, tfcompile.LINK)
TOOLCHAINS: Mapping[str, Toolchain] = MappingProxyType(
    {
        "tfcompile": Toolchain(compile_with_tfcompile, tfcompile.describe_compiler, tfcompile.RUNTIME, _TFCOMPILE),
        "iree": Toolchain(
            compile_with_iree, lambda: f"iree {require_version(PACKAGE)}", "iree", (LOWER, tfcompile.COMPILE)
        ),
    }
)


def call(
    isolated: Isolated,
    function: Callable[..., None],
    arguments: Mapping[str, Any],
    log: Path,
    *,
    failure: type[StageError] = CompileFailed,
    crash: type[StageError] = CompileCrashed,
) -> None:
    """Call a TensorFlow function in a separate process. On errors raise ``failure``, ``crash`` or StageTimeout."""
    with convert_errors("compile", "TensorFlow", failure, "", crash=crash, died="TensorFlow"):
        isolated.call(function, arguments, timeout=TIMEOUT_SECONDS, log=log)


def _name_variables(names: Sequence[str], plain: int) -> tuple[str, ...]:
    return tuple(name if number < plain else f"variable {name}" for number, name in enumerate(names))
