"""What a suite run was asked to do. Stored with it, so that it can be gone on with."""

from __future__ import annotations

import fnmatch
import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hil.controller.devices.board_choice import is_lent
from hil.controller.pipeline.options import CaseSettings, flag_of, specs_of, stored_settings
from hil.errors import UsageError


@dataclass(frozen=True)
class Settings(CaseSettings):
    """How a suite's cases are to be run, whatever the flow."""

    profile: bool = False  # run a second time under the runtime's profiler


@dataclass(frozen=True)
class Request:
    """What `hil suite run` was asked to do."""

    source: str  # the suite: see :func:`hil.controller.workloads.suites.sources.open_suite`
    flow: str = "iree"  # its name, or a file
    boards: tuple[str, ...] = ()  # what ``--board`` named, in order; empty is the simulator
    hw_type: str = ""  # what ``--runtime-hw-type`` named
    # ``identity``, ``known_hosts``, ``accept_new_host_key`` where they were given.
    ssh: Mapping[str, Any] = field(default_factory=dict)
    # shell patterns over case ids, of which one must match; one without wildcards matches a part of the id, one after
    # an equals sign the id itself.
    filters: tuple[str, ...] = ()
    layers: bool = True  # also a case for each layer of a model
    group: str = "node"  # what a layer is: see :func:`hil.controller.analysis.layers.layers_of`
    layer_inputs: str = "real"  # or ``random``: layers run on what the reference computed, or on random values
    merge: str = "content"  # which layers are one case: see :func:`hil.controller.analysis.layers.unmerged`
    # sizes of symbolic dimensions, and ranges of them, such as ``1..512``
    dims: Mapping[str, int | str] = field(default_factory=dict)
    only_expected_failures: bool = False  # leave out what is expected to pass
    confirm: int = 0  # how often a mismatch is run again
    keep_all: bool = False
    # how many compile at a time, None is one a core; with boards of a farm, how many of those run at a time.
    jobs: int | None = None
    faults: tuple[str, ...] = ()
    wait_s: float = 60.0
    settings: Settings = field(default_factory=Settings)
    # kind of profile (``run``, ``compile``) -> the folder in which each case's has a folder of its own.
    profiles: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What JSON can say of it."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Request:
        """The request of a stored run."""
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in dict(values).items()
        }
        settings = stored_settings(dict(plain.pop("settings")), Settings)
        return cls(**plain, settings=Settings(**settings))

    def for_target(self, name: str, **options: Any) -> Request:
        """The same with other options, for one of several targets: what is written beside its run lies apart."""
        settings = self.settings
        if settings.debug_ir is not None:
            settings = replace(settings, debug_ir=settings.debug_ir / name)
        profiles = {kind: str(Path(folder) / name) for kind, folder in self.profiles.items()}
        return replace(self, **options, settings=settings, profiles=profiles)

    @property
    def on_farm(self) -> bool:
        """Whether it runs on boards that a farm lends."""
        return any(is_lent(board) for board in self.boards)

    def selects(self, case_id: str) -> bool:
        """Whether the filters let a case through."""
        return not self.filters or any(_matches(case_id, pattern) for pattern in self.filters)

    def remarks(self, ids: Sequence[str]) -> list[str]:
        """A line for each filter that no case of the suite is called like."""
        idle = [pattern for pattern in self.filters if not any(_matches(case_id, pattern) for case_id in ids)]
        return [f"--filter {pattern}: no case is called like that" for pattern in idle]

    def command(self, *case_ids: str) -> str:
        """The command that runs some of the cases again; without any, all that it is about."""
        filters = [f"={case_id}" for case_id in case_ids] or self.filters
        words = ["hil", "suite", "run", self.source, "--flow", self.flow]
        words += [word for pattern in filters for word in ("--filter", pattern)]
        words += ["--no-layers"] * (not self.layers and not case_ids)
        return shlex.join([*words, *self._option_words])

    @functools.cached_property
    def _option_words(self) -> list[str]:
        words = ((name,) if value is True else (name, str(value)) for name, value in self._options())
        return [word for pair in words for word in pair]

    def _options(self) -> list[tuple[str, Any]]:
        """The options that decide what a case comes to, where they are not as usual."""
        usual, settings = Request(self.source), self.settings
        named: list[tuple[str, Any, Any]] = [
            *(("--board", board, "") for board in self.boards),
            ("--runtime-hw-type", self.hw_type, ""),
            ("--identity", self.ssh.get("identity"), None),
            ("--known-hosts", self.ssh.get("known_hosts"), None),
            ("--group", self.group, usual.group),
            ("--layer-inputs", self.layer_inputs, usual.layer_inputs),
            ("--merge", self.merge, usual.merge),
            *(("--dim", f"{name}={size}", "") for name, size in self.dims.items()),
            *(("--fault", fault, "") for fault in self.faults),
        ]
        for name, spec in specs_of(CaseSettings).items():
            value, without = getattr(settings, name), getattr(usual.settings, name)
            if spec.decides:
                named += [(flag_of(name, spec), one, without) for one in (value if spec.repeats else (value,))]
        return [(name, value) for name, value, without in named if value is not None and value != without]


def make_profile_folders(folders: Mapping[str, str | Path]) -> None:
    """Make the folders of cases' profiles, by kind. Raises UsageError: one cannot be."""
    for kind, folder in folders.items():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder} cannot hold {kind} profiles: {error.strerror or error}") from error


def _matches(case_id: str, pattern: str) -> bool:
    if pattern.startswith("="):
        return case_id == pattern[1:]
    if not any(char in pattern for char in "*?["):
        return pattern in case_id
    return fnmatch.fnmatchcase(case_id, pattern)
