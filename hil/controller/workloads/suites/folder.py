"""Models in a folder of the user's, with what lies beside them."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hil.controller.models.importers import importers
from hil.controller.storage.paths import exists
from hil.controller.storage.tensor_files import load_npz
from hil.controller.workloads.bundles.flagfile import calls_left_out, flagfiles_among, is_flagfile
from hil.controller.workloads.bundles.onnx import data_sets, data_sets_left_out, model_of_data_sets
from hil.controller.workloads.suites.bundled import (
    GOLDEN,
    brings_cases,
    by_program,
    cases_in,
    cases_of_flagfiles,
    files_of,
    is_golden,
)
from hil.controller.workloads.suites.model_cases import SuiteModel
from hil.controller.workloads.suites.spec import numbered, worded
from hil.core.tensors import Array
from hil.errors import UsageError

INPUTS = ".inputs.npz"
EXPECTED = ".expected.npz"
CALIBRATION = ".calibration.npz"
# TensorFlow's SavedModel is a folder, known by this file in it; the other .pb files there are no models.
_SAVED_MODEL = "saved_model.pb"
# Files by which a folder is known to be a model, which is then called by the folder's name.
_FOLDERS = (_SAVED_MODEL, GOLDEN)
# A folder that holds one of these is what hil wrote of a run, with copies of models in it.
_RUNS = ("suite.json", "run.json")


@dataclass(frozen=True)
class Found:
    """What a path of the user's holds.

    Attributes:
        models: by path.
        left_out: test cases that lie there and cannot be run, a line for each place.
    """

    models: list[SuiteModel]
    left_out: list[str]


def models_at(path: Path) -> list[SuiteModel]:
    """The models that :func:`look` finds."""
    return look(path).models


def look(path: Path) -> Found:
    """The models of a folder and those below, by path; or the one that a file is.

    A model is called by its file's name, or by its folder's where TensorFlow saved it as one or hil exported it as a
    golden folder; where several have the same one, by their paths in the folder (``a.net`` and ``b.net`` for
    ``a/net.onnx`` and ``b/net.onnx``), and where these are alike too, with their suffixes.

    Test cases that lie with a model are its own: folders ``test_data_set_N`` beside an ONNX model, and flag files that
    name a program of IREE's. Where the program is elsewhere, the first of its flag files takes the model's place.

    Raises:
        UsageError: the file is no model, or the folder cannot be read.
    """
    if path.is_dir():
        root, files = path, sorted(_walk(path))
        flagged, left_out = by_program(flagfiles_among(files))
        sets = {file.parent.parent for file in files if file.parent.name.startswith("test_data_set")}
        left_out += [*calls_left_out(files), *(line for one in sorted(sets) for line in data_sets_left_out(one))]
    else:
        root, files, left_out = path.parent, [path], []
        flagged, _ = by_program([path] if is_flagfile(path.name) else flagfiles_among(root.iterdir()))
        if not is_flagfile(path.name):
            flagged = {program: its for program, its in flagged.items() if program == path.resolve()}
        if not flagged and not _is_model(path, _suffixes()):
            hint = f"one of {', '.join(_suffixes())}"
            raise UsageError(f"{path.name} is no kind of model that hil knows", hint=hint)
    suffixes = _suffixes()
    own = {file: flagged.pop(file.resolve(), []) for file in files if _is_model(file, suffixes)}
    elsewhere = {its[0]: program.name for program, its in flagged.items()}
    own |= {its[0]: its for its in flagged.values()}
    ordered = sorted(own)
    called = [_called(file.relative_to(root)) for file in ordered]
    called = [one.with_name(elsewhere.get(file, one.name)) for file, one in zip(ordered, called, strict=True)]
    models = [_model(name, file, own[file]) for name, file in zip(_names(called), ordered, strict=True)]
    return Found(models, left_out)


def _walk(folder: Path) -> Iterator[Path]:
    """The files of a folder and those below, but for what is hidden, a package manager's, or hil's own of a run."""

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error

    for place, below, names in os.walk(folder, onerror=refuse):
        if any(name in names for name in _RUNS):
            below.clear()
            continue
        if GOLDEN in names and is_golden(Path(place, GOLDEN)):
            below.clear()
            yield Path(place, GOLDEN)
            continue
        below[:] = [name for name in below if not name.startswith(".") and not _is_foreign(Path(place, name))]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _is_foreign(folder: Path) -> bool:
    """Whether a folder holds what package managers put there: a virtual environment has models of its own."""
    return folder.name in ("__pycache__", "node_modules") or (folder / "pyvenv.cfg").exists()


def _suffixes() -> tuple[str, ...]:
    return tuple(sorted(suffix for one in importers().values() for suffix in one.suffixes))


def _is_model(file: Path, suffixes: tuple[str, ...]) -> bool:
    if file.name in _FOLDERS:
        return file.name == _SAVED_MODEL or is_golden(file)
    return file.name.lower().endswith(suffixes) and not file.name.lower().endswith(".pb")


def _names(files: list[Path]) -> list[str]:
    """A name for each file: the shortest of stem, path and path with suffix that tells it from all others."""
    forms = [[worded(part) for part in (own.stem, str(own.with_suffix("")), str(own))] for own in files]
    names = [form[0] for form in forms]
    for longer in (1, 2):
        count = Counter(names)
        names = [form[longer] if count[name] > 1 else name for name, form in zip(names, forms, strict=True)]
    return numbered(names)


def _called(file: Path) -> Path:
    """The path that a model is called by: its file, or the folder that a SavedModel or a golden folder is."""
    return file.parent if file.name in _FOLDERS and file.parent.name else file


def _model(name: str, file: Path, flagfiles: Sequence[Path]) -> SuiteModel:
    inputs, expected, calibration = (_archive(file, kind) for kind in (INPUTS, EXPECTED, CALIBRATION))
    beside = [inputs, expected, calibration]
    model = SuiteModel(name, file, given=functools.partial(_read, inputs), expected=functools.partial(_read, expected))
    is_case = exists(inputs) or exists(expected)
    if flagfiles:
        beside += [one for flagfile in flagfiles for one in _files_of(flagfile) if one != file]
        own = cases_of_flagfiles(flagfiles, file.parent)
        model = replace(model, own_cases=lambda shop: own, is_case=is_case)
    elif brings_cases(file):
        if is_golden(file):
            beside += [one for one in sorted(file.parent.rglob("*")) if one.is_file() and one != file]
        model = replace(model, own_cases=functools.partial(cases_in, file), is_case=is_case)
    elif file.suffix.lower() == ".onnx" and model_of_data_sets(file.parent) == file:
        model = replace(model, data_sets=tuple(data_sets(file.parent)))
        beside += [one for place in model.data_sets for one in sorted(place.iterdir())]
    return replace(model, beside=tuple(dict.fromkeys(beside)))


def _files_of(flagfile: Path) -> list[Path]:
    try:
        return files_of(flagfile)
    except UsageError:  # its case runs into it again, and tells
        return [flagfile]


def _read(archive: Path) -> Mapping[str, Array]:
    """The arrays beside a model, as ``net.inputs.npz`` beside ``net.onnx`` or the folder ``net`` of a SavedModel."""
    return load_npz(archive) if exists(archive) else {}


def _archive(file: Path, kind: str) -> Path:
    own = _called(file)
    return own.with_name(own.stem + kind)
