"""TensorFlow's models: SavedModels (a folder, by its saved_model.pb) and Keras's .keras files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.storage.packages import needed_version

_FOLDERS = ("variables", "assets", "assets.extra")


def describe_saved_model(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read the signature of a function of a SavedModel: one of its signatures, or a method.

    The new values of the variables that it assigns are outputs as well, after its own: ``variable NAME``.
    An open dimension is a symbol such as ``x.dim0``.

    Raises:
        ImportFailed: it is no SavedModel, or is damaged.
        UsageError: TensorFlow is not installed; no such function or dimension; several functions and none chosen.
    """
    folder = Path(path).parent
    found = _describe(path, function, dims)
    files = [file for name in _FOLDERS for file in sorted((folder / name).rglob("*")) if file.is_file()]
    beside = [file for file in (folder / "fingerprint.pb",) if file.is_file()]
    return found | {"external": [file.relative_to(folder).as_posix() for file in (*files, *beside)]}


def describe_keras(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read what a Keras model takes and gives; it is called with ``training=False``.

    The first dimension is ``batch`` where the model leaves it open, others are symbols such as ``x.dim1``.

    Raises:
        ImportFailed: it is no .keras file, is damaged, or holds layers that are code (lambdas, layers of one's own).
        UsageError: TensorFlow is not installed; no such function or dimension.
    """
    return _describe(path, function, dims)


def _describe(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    version = needed_version("tensorflow", "tensorflow")
    from hil.controller.models.tensorflow.source import open_model

    source = open_model(path, function, dims)
    outputs = (*source.outputs(), *source.new_values())
    return {
        "function": source.name,
        "inputs": [[spec.name, spec.dtype, list(spec.shape)] for spec in source.inputs],
        "outputs": [[spec.name, spec.dtype, list(spec.shape)] for spec in outputs],
        "ranges": {},
        "external": [],
        "producer": {"read with": f"tensorflow {version}", "functions": list(source.functions)},
    }
