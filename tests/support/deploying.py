"""Deploy small agents to this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hil.controller.devices.deploy.ensure import AgentPlace, AgentRecipe, ensure_agent

Small = Callable[..., AgentRecipe]


def empty_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pip use an empty package index."""
    simple = folder / "simple"
    simple.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", simple.as_uri())
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def put(shell: Any, recipe: AgentRecipe, say: Callable[[str], None] = print, folder: str = "") -> AgentPlace:
    return ensure_agent(shell, recipe, folder=folder, board="here", say=say)


def accepts(place: AgentPlace) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(place.socket) == 0
