"""Choose the axis of a search from --bisect and --over."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from hil.controller.records.decisions.gate import AxisName
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.workloads.gate.bisection.axes.axis import BisectAxis
from hil.controller.workloads.gate.bisection.axes.compilers import CompilerAxis
from hil.controller.workloads.gate.bisection.axes.drivers import DriverAxis
from hil.controller.workloads.gate.bisection.axes.flags import FlagAxis
from hil.controller.workloads.gate.bisection.axes.worktree import BuiltCompilerAxis, CommitAxis
from hil.controller.workloads.gate.bisection.repository import GitRepository
from hil.errors import UsageError, did_you_mean

DEFAULT_OVER = "commit"
_AXES: Sequence[AxisName] = get_args(AxisName)
_WITH_VERSIONS = ("compiler", "driver")
# pip and shells receive the versions, so they must not contain other characters.
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,79}")
_MAX_VERSIONS = 1000


@dataclass(frozen=True)
class SearchPlan:
    """A search that the user requested.

    Attributes:
        versions: versions of a compiler or driver, oldest first.
        command: command of --bisect; None without the option.
    """

    axis: AxisName
    versions: Sequence[str]
    command: str | None
    timeout_s: float

    def open_repository(self) -> GitRepository | None:
        """Return the repository of the working directory if the command builds in a worktree, otherwise None.

        Raises:
            UsageError: the working directory is not in a repository.
        """
        is_build = self.axis == "commit" or (self.axis == "compiler" and self.command is not None)
        return GitRepository.find(Path()) if is_build else None

    def make_axis(
        self, repository: GitRepository | None, context: RunContext, screen: Progress, folder: Path
    ) -> BisectAxis:
        """Return the axis.

        Args:
            folder: directory of the gate, for logs.
        """
        command = self.command or ""
        if repository is not None and self.axis == "commit":
            return CommitAxis(repository, command, self.timeout_s)
        if repository is not None:
            return BuiltCompilerAxis(repository, command, self.timeout_s, self.versions)
        if self.axis == "compiler":
            return CompilerAxis(self.versions, context)
        if self.axis == "driver":
            return DriverAxis(command, self.timeout_s, self.versions, folder, screen)
        return FlagAxis()


def plan_search(over: str, command: str | None, timeout_s: float) -> SearchPlan | None:
    """Return the search, or None without one.

    Args:
        over: value of --over: ``commit``, ``flag``, ``compiler=V1,V2`` or ``driver=V1,V2``.
        command: command of --bisect, or None.

    Raises:
        UsageError: the options are invalid.
    """
    name, _, values = over.partition("=")
    axis = next((one for one in _AXES if one == name), None)
    if axis is None:
        hint = f"{did_you_mean(name, _AXES)}axes: commit, flag, compiler=V1,V2, driver=V1,V2"
        raise UsageError(f"invalid --over {over!r}: unknown axis", hint=hint, option="--over")
    if axis == "commit" and command is None and over == DEFAULT_OVER:
        return None
    versions = tuple(filter(None, (one.strip() for one in values.split(","))))
    if axis in _WITH_VERSIONS:
        _check_versions(axis, versions)
    elif "=" in over:
        raise UsageError(f"invalid --over {over!r}: {axis} has no values", option="--over")
    if axis == "driver" and not (command or "").strip():
        raise UsageError(
            "--over driver requires --bisect COMMAND",
            hint="COMMAND installs version HIL_DRIVER on board HIL_BOARD",
            option="--over",
        )
    if axis == "flag" and command is not None:
        raise UsageError("--over flag does not use --bisect", hint="hil compiles the model itself", option="--over")
    return SearchPlan(axis, versions, command, timeout_s)


def _check_versions(axis: str, versions: Sequence[str]) -> None:
    if invalid := next((one for one in versions if not _VERSION.fullmatch(one)), ""):
        raise UsageError(f"invalid version {invalid!r} in --over {axis}", option="--over")
    if len(set(versions)) != len(versions) or not 2 <= len(versions) <= _MAX_VERSIONS:
        raise UsageError(
            f"--over {axis} requires at least two different versions, oldest first",
            hint=f"for example --over {axis}=1.0,1.1,1.2",
            option="--over",
        )
