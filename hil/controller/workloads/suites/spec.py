"""What a suite consists of: cases before anything was done with them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.program_case import ProgramCase
from hil.core.digest import digest_of
from hil.core.tensors import Array

# A case's folder is called by its id, and a file name has at most 255 bytes.
_LONGEST = 160
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._+-]")


def worded(path: str) -> str:
    """A path or name as an id may hold it."""
    return _NOT_IN_IDS.sub("_", path.replace(os.sep, "."))


def short(name: str) -> str:
    """A name that a folder can have; of one that is too long a digest tells it from others."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 9]}-{digest_of(name.encode())[-8:]}"


@dataclass(frozen=True)
class CaseData:
    """What a case runs."""

    path: Path  # its model, a flow's recipe applied
    inputs: Mapping[str, Array] = field(default_factory=dict)  # name -> tensor; what is missing is seeded random
    # outputs that take the references' place; empty asks a reference.
    expected: Mapping[str, Array] = field(default_factory=dict)
    # the model before the flow's recipe: its reference's answer is compared too, and told apart. None where there was
    # no recipe.
    plain_path: Path | None = None
    # outputs that take the place of that reference; empty asks it.
    plain_expected: Mapping[str, Array] = field(default_factory=dict)
    # rtol, atol: the case's own tolerance; None is the dtype's default.
    rtol: float | None = None
    atol: float | None = None
    dims: Mapping[str, int] = field(default_factory=dict)  # values of symbolic dimensions
    # the case with its compiled program, where it came with one; then all but the tolerance stands there.
    program: ProgramCase | None = None


@dataclass(frozen=True)
class CaseSpec:
    """One case. Its name is cheap to know; its data is made when it is its turn."""

    # unique in its suite and the same in every run: ``<model>_full_model``, ``<model>_layer_<op>_<name>``, for a case
    # that came with the model ``<model>_<case>``, a node test's name. Letters, digits and ``._+-`` only.
    id: str
    model: str
    # makes the data; the folder is the case's own and empty. Called in a thread, for each case at most once. Raises
    # HilError (stage ``import`` where it says none).
    make: Callable[[Path], CaseData]
    layer: str = ""  # the layer's name; "" is the whole model
    op: str = ""  # the operator, or those of a group (``Conv+Relu``); "" is a whole model
    # digest of all that it is made from. A run that is gone on with runs a case again where it is another.
    content: str = ""
    params: Mapping[str, str] = field(default_factory=dict)  # what its test is parametrised by, such as ``dtype``
    # the model's file and its digest, of its external data too; None where there is none that can be read
    file: ModelFile | None = None


@dataclass(frozen=True)
class ModelFile:
    """The file of a model, before the flow's recipe."""

    path: str
    digest: str


def model_files(specs: Sequence[CaseSpec]) -> dict[str, dict[str, str]]:
    """Model -> path and digest of its file, for a record of the run."""
    return {spec.model: dict(vars(spec.file)) for spec in specs if spec.file is not None}


@dataclass(frozen=True)
class Suite:
    """Cases under one name."""

    name: str  # ``operators``, ``models``, or the folder's name
    source: str  # what names it on the command line
    cases: tuple[CaseSpec, ...]  # in order; their ids differ
    # the file of expected failures, whether it is there or not; None where there can be none.
    expected: Path | None = None
    left_out: tuple[str, ...] = ()  # what cannot be run: test cases that lie there, layers; a line for each place


@dataclass(frozen=True)
class OwnCase:
    """A case that a file brings with it."""

    name: str  # unique in its file and the same in every run
    content: str  # digest of all that it is made from; "" where that cannot be read, then making it says so
    # makes it, with the case's own folder; raises UsageError where it cannot be read.
    make: Callable[[Path], ProgramCase]


@dataclass(frozen=True)
class SuiteModel:
    """A model of a suite and what is known of it."""

    name: str  # unique in the suite
    path: Path
    dims: Mapping[str, int] = field(default_factory=dict)
    given: Callable[[], Mapping[str, Array]] = dict  # inputs by name; what is missing is seeded random
    expected: Callable[[], Mapping[str, Array]] = dict  # outputs that take the reference's place
    # samples for recipes, each input -> tensor. Where there are none, recipes look for ``<model>.calibration.npz``
    # beside the model, then take what was given as inputs, then random samples.
    calibration: Callable[[], Sequence[Mapping[str, Array]]] = tuple
    beside: tuple[Path, ...] = ()  # further files that its cases are made from, there or not
    # rtol, atol: tolerance for the whole model; None is the dtype's default, as for each layer.
    rtol: float | None = None
    atol: float | None = None
    # the cases that its file brings with it, each with a compiled program; None for a file that is a model alone.
    own_cases: Callable[[RunContext], Sequence[OwnCase]] | None = None
    # folders of inputs and expected outputs, ONNX's own test data: a case each. The whole model has the inputs of the
    # first valid one where none are given.
    data_sets: tuple[Path, ...] = ()
    is_case: bool = True  # whether it is a case by itself even where its file brings cases
    is_cut: bool = True  # whether its layers are cases as well
