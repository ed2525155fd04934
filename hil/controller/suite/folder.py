"""Models in a folder of the user's, with what lies beside them."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from hil.controller.importers import importers
from hil.controller.suite.bundled import bundled
from hil.controller.suite.model_cases import SuiteModel
from hil.controller.tensor_files import load_npz
from hil.errors import UsageError
from hil.tensors import Array

INPUTS = ".inputs.npz"
EXPECTED = ".expected.npz"
CALIBRATION = ".calibration.npz"
# TensorFlow's SavedModel is a folder, known by this file in it; the other .pb files there are no models.
_SAVED_MODEL = "saved_model.pb"
_BUNDLED = ".bpte"
# A folder that holds one of these is what hil wrote of a run, with copies of models in it.
_RUNS = ("suite.json", "run.json")
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._+-]")


def models_at(path: Path) -> list[SuiteModel]:
    """The models of a folder and those below, by path; or the one that a file is.

    A model is called by its file's name, or its folder's where TensorFlow saved it as one; where several have the same
    one, by their paths in the folder (``a.net`` and ``b.net`` for ``a/net.onnx`` and ``b/net.onnx``), and where these
    are alike too, with their suffixes.

    Raises:
        UsageError: the file is no model, or the folder cannot be read.
    """
    if path.is_dir():
        files, root = sorted(_walk(path)), path
    else:
        suffixes = _suffixes()
        if not _is_model(path.name, suffixes):
            raise UsageError(f"{path.name} is no kind of model that hil knows", hint=f"one of {', '.join(suffixes)}")
        files, root = [path], path.parent
    return [
        _model(name, file) for name, file in zip(_names([one.relative_to(root) for one in files]), files, strict=True)
    ]


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error

    suffixes = _suffixes()
    for place, below, names in os.walk(folder, onerror=refuse):
        if any(name in names for name in _RUNS):
            below.clear()
            continue
        below[:] = [name for name in below if not name.startswith(".") and not _is_foreign(Path(place, name))]
        yield from (Path(place, name) for name in names if not name.startswith(".") and _is_model(name, suffixes))


def _is_foreign(folder: Path) -> bool:
    """Whether a folder holds what package managers put there: a virtual environment has models of its own."""
    return folder.name in ("__pycache__", "node_modules") or (folder / "pyvenv.cfg").exists()


def _suffixes() -> tuple[str, ...]:
    # A bundle has its cases in itself: `hil bundle run` runs it.
    formats = {name: one for name, one in importers().items() if name != "hilb"}
    return tuple(sorted(suffix for one in formats.values() for suffix in one.suffixes))


def _is_model(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.lower().endswith(suffixes) and (name == _SAVED_MODEL or not name.lower().endswith(".pb"))


def _names(files: list[Path]) -> list[str]:
    """A name for each file: the shortest of stem, path and path with suffix that tells it from all others."""
    forms = [
        [_worded(part) for part in (own.stem, str(own.with_suffix("")), str(own))] for own in map(_named_by, files)
    ]
    names = [form[0] for form in forms]
    for longer in (1, 2):
        count = Counter(names)
        names = [form[longer] if count[name] > 1 else name for name, form in zip(names, forms, strict=True)]
    taken: set[str] = set()
    for position, name in enumerate(names):
        again = 1
        while names[position] in taken:
            again += 1
            names[position] = f"{name}-{again}"
        taken.add(names[position])
    return names


def _named_by(file: Path) -> Path:
    """The path that a model is called by: its file, or the folder that a SavedModel is."""
    return file.parent if file.name == _SAVED_MODEL and file.parent.name else file


def _worded(path: str) -> str:
    return _NOT_IN_IDS.sub("_", path.replace(os.sep, "."))


def _model(name: str, file: Path) -> SuiteModel:
    return SuiteModel(
        name,
        file,
        given=functools.partial(_beside, file, INPUTS),
        expected=functools.partial(_beside, file, EXPECTED),
        beside=tuple(_archive(file, kind) for kind in (INPUTS, EXPECTED, CALIBRATION)),
    )


def _beside(file: Path, kind: str) -> Mapping[str, Array]:
    """The arrays beside a model, as ``net.inputs.npz`` beside ``net.onnx`` or the folder ``net`` of a SavedModel.

    Where there is no such file, what a ``.bpte`` has within itself, or nothing.
    """
    archive = _archive(file, kind)
    if archive.exists():
        return load_npz(archive)
    return bundled(file, outputs=kind == EXPECTED) if file.suffix.lower() == _BUNDLED else {}


def _archive(file: Path, kind: str) -> Path:
    own = _named_by(file)
    return own.with_name(own.stem + kind)
