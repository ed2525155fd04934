"""Models in a folder of the user's, with what lies beside them."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from hil.controller.importers import importers
from hil.controller.suite.model_cases import SuiteModel
from hil.controller.tensor_files import load_npz
from hil.errors import UsageError
from hil.tensors import Array

INPUTS = ".inputs.npz"
EXPECTED = ".expected.npz"
CALIBRATION = ".calibration.npz"
# A folder that holds one of these is what hil wrote of a run, with copies of models in it.
_RUNS = ("suite.json", "run.json")
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._+-]")


def models_at(path: Path) -> list[SuiteModel]:
    """The models of a folder and those below, by path; or the one that a file is.

    A model is called by its file's name; where several have the same one, by their paths in the folder (``a.net``
    and ``b.net`` for ``a/net.onnx`` and ``b/net.onnx``), and where these are alike too, with their suffixes.

    Raises:
        UsageError: the file is no model, or the folder cannot be read.
    """
    if path.is_dir():
        files, root = sorted(_walk(path)), path
    else:
        suffixes = _suffixes()
        if path.suffix.lower() not in suffixes:
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
    return tuple(sorted(suffix for one in importers().values() for suffix in one.suffixes))


def _is_model(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.lower().endswith(suffixes)


def _names(files: list[Path]) -> list[str]:
    """A name for each file: the shortest of stem, path and path with suffix that tells it from all others."""
    forms = [[_worded(part) for part in (file.stem, str(file.with_suffix("")), str(file))] for file in files]
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
    """The arrays beside a model, as ``net.inputs.npz`` beside ``net.onnx``; nothing where there is no such file."""
    archive = _archive(file, kind)
    return load_npz(archive) if archive.exists() else {}


def _archive(file: Path, kind: str) -> Path:
    return file.with_name(file.stem + kind)
