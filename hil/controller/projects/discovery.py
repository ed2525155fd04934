"""Find the models of a directory and the boards of the user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hil.controller.devices.ssh.aliases import list_aliases
from hil.core.boards import BOARDS_FOLDER, list_boards, read_board
from hil.errors import UsageError


@dataclass(frozen=True)
class ModelFormat:
    """Settings for models of a format.

    Attributes:
        extra: extra of hil that the format needs, or "".
        has_reference: False if hil compares only with outputs from the user.
    """

    extra: str = ""
    has_reference: bool = True


# Suffix -> format, in order of preference.
MODEL_FORMATS = {
    ".onnx": ModelFormat(),
    ".tflite": ModelFormat(extra="tflite"),
    ".mlir": ModelFormat(has_reference=False),
}
# Directories that contain no models of the project.
_SKIPPED = ("__pycache__", "node_modules")
# A directory with any such file is a virtual environment or a stored result, which contains other models.
_MARKS = ("pyvenv.cfg", "run.json", "suite.json", "bench.json")
DEFAULT_BOARD = "sim"


@dataclass(frozen=True)
class FoundBoard:
    """Board that a project can use."""

    name: str  # value of --board
    description: str


def find_models(folder: Path) -> list[Path]:
    """Return the models in a directory tree, relative to the directory, sorted by format and name.

    A missing directory has no models.

    Skips hidden files, virtual environments and stored results. Links to directories are not followed.
    """
    found = []
    for place, below, names in os.walk(folder):
        if any(name in names for name in _MARKS):
            below.clear()
            continue
        below[:] = sorted(name for name in below if not name.startswith(".") and name not in _SKIPPED)
        found += [Path(place, name).relative_to(folder) for name in names if is_model(name)]
    order = list(MODEL_FORMATS)
    return sorted(found, key=lambda path: (order.index(path.suffix.lower()), path))


def is_model(name: str) -> bool:
    """Return True if a file name is the name of a model."""
    return not name.startswith(".") and Path(name).suffix.lower() in MODEL_FORMATS


def find_boards(folder: Path) -> list[FoundBoard]:
    """Return the boards for a project in this directory: the simulator first, then configs, then hosts of SSH."""
    found = {DEFAULT_BOARD: FoundBoard(DEFAULT_BOARD, "simulator on this machine")}
    for name, path in _iter_configs(folder):
        try:
            board = read_board(path)
        except UsageError:
            continue  # `hil board list` shows the error
        # A config without an address describes a type of boards.
        if not board.is_shipped and (board.config.connection.address or board.config.is_simulator):
            found.setdefault(name, FoundBoard(name, board.config.description or board.config.hw_type))
    for alias in list_aliases():
        found.setdefault(f"ssh:{alias}", FoundBoard(f"ssh:{alias}", "host in ~/.ssh/config"))
    return list(found.values())


def _iter_configs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the named board configs of hil, of the user and of the project."""
    here = Path(BOARDS_FOLDER)
    yield from ((name, path) for name, path in list_boards().items() if path.parent != here)
    yield from ((path.stem, path) for path in sorted((folder / BOARDS_FOLDER).glob("*.toml")))
