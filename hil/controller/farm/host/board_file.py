"""A board's config written anew: with the way that its host has to it, and the fence of a lease."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomlkit

from hil.core.boards import BoardConfig

# Files that a config names, relative to itself.
_FILES = ("token_file", "ca", "cert", "key", "identity", "known_hosts")


def lease_text(config: BoardConfig, address: str, fence: int, lease: str = "") -> str:
    """The config with which a lease's job uses the board: without its power, which only a check may switch.

    A switch knows no fence: whoever wakes up after its lease is over would take the board from the next job.

    Args:
        config: the board's.
        address: where its host reaches the agent; "" is the config's own.
        fence: the lease's.
        lease: which one it is, for results.
    """
    document = _document(config)
    document.pop("power", None)
    connection = {**_set_fields(config), "fence": fence, "lease": lease}
    if address:
        connection["address"] = address
    for name in _FILES:
        if name in connection:
            connection[name] = _absolute(connection[name], config.path.parent)
    document["connection"] = connection
    runtime = document.get("runtime", {})
    if runtime.get("file"):
        runtime["file"] = _absolute(runtime["file"], config.path.parent)
    return tomlkit.dumps(document)


def public_text(config: BoardConfig) -> str:
    """The config as others may see it: without the way to the board, its keys and its power."""
    document = _document(config)
    for table in ("connection", "power"):
        document.pop(table, None)
    return tomlkit.dumps(document)


def sim_text(config: BoardConfig, name: str, address: str) -> str:
    """The config of a simulated board that its host starts, of the kind that ``config`` is."""
    document = _document(config)
    document["board"]["name"] = name
    document["connection"] = {"address": address}
    return tomlkit.dumps(document)


def _document(config: BoardConfig) -> dict[str, Any]:
    """The config's tables as they were read, with what else depends on its name and place."""
    document: dict[str, Any] = tomlkit.parse(config.text).unwrap()
    board = document.setdefault("board", {})
    board.update(name=config.name, hw_type=config.hw_type)
    document.pop("labgrid", None)  # its place is held already, by whoever has the board
    return document


def _set_fields(config: BoardConfig) -> dict[str, Any]:
    return {key: value for key, value in asdict(config.connection).items() if value}


def _absolute(text: str, folder: Path) -> str:
    path = Path(text)
    with contextlib.suppress(RuntimeError):  # the home of a user that there is not: an error when it is used
        path = path.expanduser()
    return str(folder / path)
