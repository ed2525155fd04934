"""Definition of a suite: the cases before any processing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hil.controller.models.flows.flow import Flow
from hil.controller.records.suite import SuiteModelFile
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.program_case import ProgramCase
from hil.core.digest import digest_of
from hil.core.tensors import Array

# The ID is the name of the case's directory, and a file name has at most 255 bytes.
_MAX_ID_LENGTH = 160
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._+-]")


def replace_forbidden(path: str) -> str:
    """Replace characters of a path or name that IDs do not allow."""
    return _NOT_IN_IDS.sub("_", path.replace(os.sep, "."))


def shorten_name(name: str) -> str:
    """Truncate a name for use as a directory name. Long names get a digest to keep them unique."""
    return name if len(name) <= _MAX_ID_LENGTH else f"{name[: _MAX_ID_LENGTH - 9]}-{digest_of(name.encode())[-8:]}"


@dataclass(frozen=True)
class CaseData:
    """Model, inputs and expected outputs of a case."""

    path: Path  # the model after the flow's recipe
    inputs: Mapping[str, Array] = field(default_factory=dict)  # name -> tensor; missing inputs are seeded random
    # Expected outputs that replace a reference. If empty, a reference computes the outputs.
    expected: Mapping[str, Array] = field(default_factory=dict)
    # The model before the flow's recipe, or None without a recipe. Outputs are also compared with the outputs of this
    # model, and the comparison is reported separately.
    plain_path: Path | None = None
    # Expected outputs of the model before the recipe. If empty, a reference computes them.
    plain_expected: Mapping[str, Array] = field(default_factory=dict)
    # rtol, atol: the case's tolerance; None selects the dtype's default.
    rtol: float | None = None
    atol: float | None = None
    dims: Mapping[str, int] = field(default_factory=dict)  # symbolic dimension values
    # Specification of --generate and the name of its prompt; None runs the model once.
    generate: Path | None = None
    prompt: str = ""
    # The bundled case with a compiled program, if any. It then determines all fields except the tolerance.
    program: ProgramCase | None = None


@dataclass(frozen=True)
class CaseSpec:
    """A case of a suite. The data is created later, because that is expensive."""

    # Unique in the suite and equal in every run: ``<model>_full_model``, ``<model>_layer_<op>_<name>``,
    # ``<model>_<case>`` for bundled cases, or a node test's name. Only letters, digits and ``._+-``.
    id: str
    model: str
    # Creates the data, given an empty directory for the case. Called at most once, in a thread. Raises HilError; the
    # default stage is ``import``.
    make: Callable[[Path], CaseData]
    layer: str = ""  # name of the layer; "" for the whole model
    op: str = ""  # operator, or the operators of a group (``Conv+Relu``); "" for a whole model
    # Digest of all source files. A resumed run repeats cases with a changed digest.
    content: str = ""
    params: Mapping[str, str] = field(default_factory=dict)  # test parameters, such as ``dtype``
    # The model's file and digest, including external data. None if the file is missing or unreadable.
    file: SuiteModelFile | None = None
    flow: Flow | None = None  # the model's flow; None is the suite's flow


def list_model_files(specs: Sequence[CaseSpec]) -> dict[str, SuiteModelFile]:
    """Return the models' files, for the run's record."""
    return {spec.model: spec.file for spec in specs if spec.file is not None}


@dataclass(frozen=True)
class Suite:
    """A named collection of cases."""

    name: str  # ``operators``, ``models``, or the directory's name
    source: str  # name on the command line
    cases: tuple[CaseSpec, ...]  # in order, with unique IDs
    # File with expected failures, which may be missing; None if the suite cannot have such a file.
    expected: Path | None = None
    left_out: tuple[str, ...] = ()  # test cases and layers that cannot be run, one line per place


@dataclass(frozen=True)
class OwnCase:
    """A case bundled in a file."""

    name: str  # unique in the file and equal in every run
    content: str  # digest of all source files; "" if unreadable: ``make`` then reports the error
    # Creates the case in the given directory. Raises UsageError if it is unreadable.
    make: Callable[[Path], ProgramCase]


@dataclass(frozen=True)
class SuiteModel:
    """A model of a suite and the accompanying data."""

    name: str  # unique in the suite
    path: Path
    dims: Mapping[str, int] = field(default_factory=dict)
    given: Callable[[], Mapping[str, Array]] = dict  # inputs by name; missing inputs are seeded random
    expected: Callable[[], Mapping[str, Array]] = dict  # expected outputs that replace the reference
    # Calibration samples for recipes, input -> tensor. Without samples, recipes use ``<model>.calibration.npz``,
    # then the given inputs, then random samples.
    calibration: Callable[[], Sequence[Mapping[str, Array]]] = tuple
    beside: tuple[Path, ...] = ()  # other source files for the cases; they may be missing
    # rtol, atol: tolerance for the whole model; None selects the default of the dtype. Layers always use the default.
    rtol: float | None = None
    atol: float | None = None
    # Cases with compiled programs bundled in the model's file; None for a plain model.
    own_cases: Callable[[RunContext], Sequence[OwnCase]] | None = None
    # Directories with inputs and expected outputs (ONNX test data), one case per directory. Without given inputs, the
    # whole model uses the inputs from the first valid directory.
    data_sets: tuple[Path, ...] = ()
    # Specification of --generate: its prompts are the cases instead of the whole model and the layers.
    generate: Path | None = None
    is_case: bool = True  # whether the whole model is a case, even if the file contains bundled cases
    is_cut: bool = True  # whether the layers are also cases
