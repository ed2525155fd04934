"""Request of a suite run, stored with the run for resuming."""

from __future__ import annotations

import fnmatch
import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hil.controller.devices.board_choice import is_provider_address
from hil.controller.pipeline.settings.option_words import format_option_values, format_option_words
from hil.controller.pipeline.settings.options import CaseSettings, flag_of, list_specs, restore_settings
from hil.core.text import convert_to_json
from hil.errors import UsageError, did_you_mean

# hil's built-in suites: source -> name. The @ distinguishes them from paths.
BUILT_IN = {"@operators": "operators", "@models": "models"}


@dataclass(frozen=True)
class Settings(CaseSettings):
    """Settings for the cases of a suite, independent of the flow."""

    profile: bool = False  # repeat the run under the runtime's profiler


@dataclass(frozen=True)
class SuiteRequest:
    """Arguments of `hil suite run`."""

    source: str  # the suite: see :func:`hil.controller.workloads.suites.cases.sources.open_suite`
    flow: str = "iree"  # name or file
    boards: tuple[str, ...] = ()  # ``--board`` values, in order; empty is the simulator
    hw_type: str = ""  # ``--runtime-hw-type`` value
    runtime: str = field(default="", kw_only=True)  # runtime instead of the flow's; "" is the flow's
    # True if the user selected no flow. Models whose format has only one runtime then run on that runtime.
    is_default_flow: bool = field(default=False, kw_only=True)
    # ``identity``, ``known_hosts``, ``accept_new_host_key``, if given.
    ssh: Mapping[str, Any] = field(default_factory=dict)
    # Shell patterns for case IDs. A case is selected if any pattern matches. A pattern without wildcards matches any
    # part of an ID. A pattern after an equals sign must match the whole ID.
    filters: tuple[str, ...] = ()
    layers: bool = True  # add a case per model layer
    group: str = "node"  # how layers are formed: see :func:`hil.controller.analysis.layers.extract_layers`
    layer_inputs: str = "real"  # ``real`` (activations from the reference) or ``random``
    merge: str = "content"  # which layers are merged: see :func:`hil.controller.analysis.layers.drop_merged`
    # Symbolic dimension sizes, or ranges such as ``1..512``.
    dims: Mapping[str, int | str] = field(default_factory=dict)
    only_expected_failures: bool = False  # skip cases that are expected to pass
    confirm: int = 0  # confirmation runs after a mismatch
    keep_all: bool = False
    # Number of parallel compilations; None uses all cores. With farm boards: number of boards in use at a time.
    jobs: int | None = None
    faults: tuple[str, ...] = ()
    wait_s: float = 60.0
    settings: Settings = field(default_factory=Settings)
    # Profile kind (``run``, ``compile``) -> directory, with a subdirectory per case.
    profiles: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON values."""
        values: dict[str, Any] = convert_to_json(asdict(self))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SuiteRequest:
        """Parse the request of a stored run."""
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in dict(values).items()
        }
        settings = restore_settings(dict(plain.pop("settings")), Settings)
        return cls(**plain, settings=Settings(**settings))

    def for_target(self, name: str, **options: Any) -> SuiteRequest:
        """Return the request with the options of a target, and with separate output directories."""
        settings = self.settings
        if settings.debug_ir is not None:
            settings = replace(settings, debug_ir=settings.debug_ir / name)
        profiles = {kind: str(Path(folder) / name) for kind, folder in self.profiles.items()}
        return replace(self, **options, settings=settings, profiles=profiles)

    @property
    def yields_flow(self) -> bool:
        """Whether models with only one runtime run on that runtime instead of the flow's."""
        return self.is_default_flow and not self.runtime

    @property
    def on_farm(self) -> bool:
        """Whether the suite runs on farm boards."""
        return any(is_provider_address(board) for board in self.boards)

    def selects(self, case_id: str) -> bool:
        """Return whether the filters select a case."""
        return not self.filters or any(_matches_filter(case_id, pattern) for pattern in self.filters)

    def list_remarks(self, ids: Sequence[str]) -> list[str]:
        """Return a warning per filter that matches no case of the suite."""
        idle = [pattern for pattern in self.filters if not any(_matches_filter(case_id, pattern) for case_id in ids)]
        similar = [f"; {meant.rstrip()}" if (meant := did_you_mean(pattern, ids)) else "" for pattern in idle]
        return [f"--filter {pattern}: no case matches{end}" for pattern, end in zip(idle, similar, strict=True)]

    def command(self, *case_ids: str) -> str:
        """Return the command that repeats the given cases, or the whole request if none are given."""
        filters = [f"={case_id}" for case_id in case_ids] or self.filters
        words = ["hil", "suite", "run", self.source]
        words += ["--flow", self.flow] if case_ids or not self.is_default_flow else []
        words += [word for pattern in filters for word in ("--filter", pattern)]
        words += ["--no-layers"] * (not self.layers and not case_ids)
        return shlex.join([*words, *self._option_words])

    @functools.cached_property
    def _option_words(self) -> list[str]:
        return format_option_words(self._list_options())

    def _list_options(self) -> list[tuple[str, Any]]:
        """Return the non-default options that affect the results of cases."""
        usual, settings = SuiteRequest(self.source), self.settings
        named: list[tuple[str, Any, Any]] = [
            *(("--board", board, "") for board in self.boards),
            ("--runtime-hw-type", self.hw_type, ""),
            ("--runtime", self.runtime, ""),
            ("--identity", self.ssh.get("identity"), None),
            ("--known-hosts", self.ssh.get("known_hosts"), None),
            ("--group", self.group, usual.group),
            ("--layer-inputs", self.layer_inputs, usual.layer_inputs),
            ("--merge", self.merge, usual.merge),
            *(("--dim", f"{name}={size}", "") for name, size in self.dims.items()),
            *(("--fault", fault, "") for fault in self.faults),
        ]
        for name, spec in list_specs(CaseSettings).items():
            value, without = getattr(settings, name), getattr(usual.settings, name)
            if spec.decides and value != without:
                values = format_option_values(name, value, repeats=spec.repeats)
                named += [(flag_of(name, spec), one, None) for one in values]
        return [(name, value) for name, value, without in named if value is not None and value != without]


def make_profile_folders(folders: Mapping[str, str | Path]) -> None:
    """Create the profile directories. Raises UsageError if that fails."""
    for kind, folder in folders.items():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot create the {kind} profile directory {folder}: {error.strerror or error}"
            ) from error


def _matches_filter(case_id: str, pattern: str) -> bool:
    if pattern.startswith("="):
        return case_id == pattern[1:]
    if not any(char in pattern for char in "*?["):
        return pattern in case_id
    return fnmatch.fnmatchcase(case_id, pattern)
