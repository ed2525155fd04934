"""hil's own files on a board: the agent, the protocol and the vocabulary they share with the controller."""

from __future__ import annotations

from pathlib import Path

from hil.controller.devices.deploy.packages import File
from hil.core.installation import own_version

# The rooms of the package that are the controller's alone.
_CONTROLLERS = {"api.py", "plugins.py", "board_configs", "controller", "py.typed", "sim", "testing"}
# What only the controller asks of the rooms that it shares with the agent.
_OF_CONTROLLER = {"core/boards.py", "core/config_files.py"}


def own_title() -> str:
    """hil's name and version."""
    return f"hil {own_version()}"


def own_files() -> dict[str, File]:
    """The files of the package ``hil`` that an agent needs, and metadata that tell its version."""
    root = Path(__file__).parents[3]
    files = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] not in _CONTROLLERS and inside.as_posix() not in _OF_CONTROLLER:
            files[f"hil/{inside.as_posix()}"] = File(path.read_bytes())
    metadata = f"Metadata-Version: 2.1\nName: hil\nVersion: {own_version()}\n"
    files[f"hil-{own_version()}.dist-info/METADATA"] = File(metadata.encode())
    return files
