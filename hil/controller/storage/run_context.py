"""What the stages of a case share, and who is told how work goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated


@dataclass(frozen=True)
class RunContext:
    """What every stage needs."""

    cache: Cache
    isolated: Isolated  # processes for what may crash


class Progress(Protocol):
    """Who is told how a job goes on."""

    def begin(self, name: str, stages: int) -> None:
        """A case has begun."""

    def stage(self, name: str, number: int, text: str) -> None:
        """A case has come to a stage."""

    def end(self, name: str, outcome: str = "", reason: str = "") -> None:
        """A case is over; what it came to, where that is known."""

    def note(self, text: str) -> None:
        """Something a person should know now."""
