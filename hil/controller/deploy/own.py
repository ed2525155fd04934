"""hil's own files on a board: the agent, the protocol and the vocabulary they share with the controller."""

from __future__ import annotations

from pathlib import Path

from hil.controller.deploy.packages import File
from hil.version import own_version

# The rooms of the package that are the controller's alone.
_CONTROLLERS = {"api.py", "boards.py", "board_configs", "controller", "py.typed", "sim", "testing", "trust.py"}


def own_title() -> str:
    """hil's name and version."""
    return f"hil {own_version()}"


def own_files() -> dict[str, File]:
    """The files of the package ``hil`` that an agent needs, and metadata that tell its version."""
    root = Path(__file__).parents[2]
    files = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] not in _CONTROLLERS:
            files[f"hil/{inside.as_posix()}"] = File(path.read_bytes())
    metadata = f"Metadata-Version: 2.1\nName: hil\nVersion: {own_version()}\n"
    files[f"hil-{own_version()}.dist-info/METADATA"] = File(metadata.encode())
    return files
