"""Record of a board's stack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from hil.controller.records.base import Record, note


class StackPart(Record, kw_only=True):
    """Part of a board's stack, such as the driver."""

    name: str
    version: Annotated[str, note("version, or another text that identifies the state; empty if unknown")]
    source: Annotated[Literal["agent", "config", "command", "unknown"], note("what supplied the version")]
    detail: Annotated[str, note("file on the board, command, or why the version is unknown; empty for the config")] = ""


def map_versions(parts: Iterable[StackPart]) -> dict[str, str]:
    """Return name -> version. An unknown version is empty."""
    return {one.name: one.version for one in parts}
