"""A job: what `hil run` was asked to do, and who is told how it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hil.controller.pipeline.case import DEFAULT_TIMEOUT_S, Options


class Progress(Protocol):
    """Who is told how a job goes on."""

    def begin(self, name: str, stages: int) -> None:
        """A case has begun."""

    def stage(self, name: str, number: int, text: str) -> None:
        """A case has come to a stage."""

    def end(self, name: str) -> None:
        """A case is over."""

    def note(self, text: str) -> None:
        """Something a person should know now."""


@dataclass(frozen=True)
class Job:
    """What `hil run` was asked to do; every field has the option of its name. Stored with the run, so it can resume."""

    models: tuple[Path, ...] = ()
    board: str = ""
    hw_type: str = ""
    identity: Path | None = None
    known_hosts: Path | None = None
    accept_new_host_key: bool = False
    runtime: str = ""
    function: str = ""
    dims: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    seed: int = 0
    input_range: tuple[float, float] | None = None
    references: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    element_types: tuple[str, ...] = ()
    rtol: float | None = None
    atol: float | None = None
    allow_blind: tuple[str, ...] = ()
    iterations: int = 1
    warmup: int = 0
    timeout: float = DEFAULT_TIMEOUT_S
    compile_flags: tuple[str, ...] = ()
    debug_ir: Path | None = None
    recompute: bool = False
    no_fallback: bool = False
    wait_s: float = 60.0
    faults: tuple[str, ...] = ()
    flagfile: Path | None = None
    out: Path | None = None
    profile: Path | None = None
    compile_time_profile: Path | None = None

    def options(self) -> Options:
        """The part that each model's way needs."""
        names = Options.__dataclass_fields__
        shared = {name: value for name, value in vars(self).items() if name in names}
        return Options(**{**shared, "profile": self.profile is not None})

    @classmethod
    def of_record(cls, request: dict[str, Any]) -> Job:
        """The job of a stored run."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in request.items()
        }
        values["models"] = tuple(Path(one) for one in values["models"])
        for name in ("debug_ir", "flagfile", "out", "identity", "known_hosts", "profile", "compile_time_profile"):
            values[name] = Path(values[name]) if values.get(name) else None
        return cls(**values)
