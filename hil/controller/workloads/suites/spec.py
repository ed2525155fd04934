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
    """What a case runs.

    Attributes:
        path: its model, a flow's recipe applied.
        inputs: name -> tensor; what is missing is seeded random.
        expected: outputs that take the references' place; empty asks a reference.
        plain_path: the model before the flow's recipe: its reference's answer is compared too, and told apart. None
            where there was no recipe.
        plain_expected: outputs that take the place of that reference; empty asks it.
        rtol, atol: the case's own tolerance; None is the dtype's default.
        dims: values of symbolic dimensions.
        program: the case with its compiled program, where it came with one; then all but the tolerance stands there.
    """

    path: Path
    inputs: Mapping[str, Array] = field(default_factory=dict)
    expected: Mapping[str, Array] = field(default_factory=dict)
    plain_path: Path | None = None
    plain_expected: Mapping[str, Array] = field(default_factory=dict)
    rtol: float | None = None
    atol: float | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    program: ProgramCase | None = None


@dataclass(frozen=True)
class CaseSpec:
    """One case. Its name is cheap to know; its data is made when it is its turn.

    Attributes:
        id: unique in its suite and the same in every run: ``<model>_full_model``, ``<model>_layer_<op>_<name>``, for a
            case that came with the model ``<model>_<case>``, a node test's name. Letters, digits and ``._+-`` only.
        make: makes the data; the folder is the case's own and empty. Called in a thread, for each case at most once.
            Raises HilError (stage ``import`` where it says none).
        layer: the layer's name; "" is the whole model.
        op: the operator, or those of a group (``Conv+Relu``); "" is a whole model.
        content: digest of all that it is made from. A run that is gone on with runs a case again where it is another.
        params: what its test is parametrised by, such as ``dtype``.
    """

    id: str
    model: str
    make: Callable[[RunContext, Path], CaseData]
    layer: str = ""
    op: str = ""
    content: str = ""
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """Cases under one name.

    Attributes:
        name: ``operators``, ``models``, or the folder's name.
        source: what names it on the command line.
        cases: in order; their ids differ.
        expected: the file of expected failures, whether it is there or not; None where there can be none.
        left_out: test cases that lie there and cannot be run, a line for each place.
    """

    name: str
    source: str
    cases: tuple[CaseSpec, ...]
    expected: Path | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class OwnCase:
    """A case that a file brings with it.

    Attributes:
        name: unique in its file and the same in every run.
        content: digest of all that it is made from; "" where that cannot be read, then making it says so.
        make: makes it, with the case's own folder; raises UsageError where it cannot be read.
    """

    name: str
    content: str
    make: Callable[[RunContext, Path], ProgramCase]


def _nothing() -> Mapping[str, Array]:
    return {}


@dataclass(frozen=True)
class SuiteModel:
    """A model of a suite and what is known of it.

    Attributes:
        name: unique in the suite.
        given: inputs by name; what is missing is seeded random.
        expected: outputs that take the reference's place.
        calibration: samples for recipes, each input -> tensor. Where there are none, recipes look for
            ``<model>.calibration.npz`` beside the model, then take what was given as inputs, then random samples.
        beside: further files that its cases are made from, there or not.
        rtol, atol: tolerance for the whole model; None is the dtype's default, as for each layer.
        own_cases: the cases that its file brings with it, each with a compiled program; None for a file that is a model
            alone.
        data_sets: folders of inputs and expected outputs, ONNX's own test data: a case each. Of the first, the whole
            model has its inputs where none are given.
        is_case: whether it is a case by itself even where its file brings cases.
    """

    name: str
    path: Path
    dims: Mapping[str, int] = field(default_factory=dict)
    given: Callable[[], Mapping[str, Array]] = _nothing
    expected: Callable[[], Mapping[str, Array]] = _nothing
    calibration: Callable[[], Sequence[Mapping[str, Array]]] = tuple
    beside: tuple[Path, ...] = ()
    rtol: float | None = None
    atol: float | None = None
    own_cases: Callable[[RunContext], Sequence[OwnCase]] | None = None
    data_sets: tuple[Path, ...] = ()
    is_case: bool = True
