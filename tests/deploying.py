"""Putting small agents on this very machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from hil.controller.deploy.ensure import AgentPlace, Recipe, put_agent

Small = Callable[..., Recipe]


def put(shell: Any, recipe: Recipe, say: Callable[[str], None] = print, folder: str = "") -> AgentPlace:
    return put_agent(shell, recipe, folder=folder, board="here", say=say)


def accepts(place: AgentPlace) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(place.socket) == 0
