"""Define the objects that all stages share, and the interface for progress."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated


@dataclass(frozen=True)
class RunContext:
    """Objects that every stage needs."""

    cache: Cache
    isolated: Isolated  # processes for code that may crash


@contextlib.contextmanager
def open_context(workers: int | None = None) -> Iterator[RunContext]:
    """Open the cache, and a pool of isolated processes that ends with the context.

    Args:
        workers: maximum number of processes; None is the number of CPU cores.
    """
    with Isolated(workers) as isolated:
        yield RunContext(Cache(), isolated)


class Progress(Protocol):
    """Receiver of a job's progress."""

    def begin(self, name: str, stages: int) -> None:
        """Called when a case starts."""

    def stage(self, name: str, number: int, text: str) -> None:
        """Called when a case reaches a stage."""

    def end(self, name: str, outcome: str = "", reason: str = "") -> None:
        """Called when a case ends, with its outcome if known."""

    def note(self, text: str) -> None:
        """Called with a message for the user."""

    def interrupt(self, command: str) -> None:
        """Called after Ctrl-C with the command that resumes the work on this machine."""
