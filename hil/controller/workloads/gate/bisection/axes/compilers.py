"""Axis of compiler versions that hil installs into its cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hil.controller.backends.compilers.versions import install_compiler
from hil.controller.pipeline.case import Case
from hil.controller.records.decisions.gate import GateCandidate, GateVerdict
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.sources.packages import require_version
from hil.controller.workloads.gate.bisection.axes.axis import BisectAxis, CandidateRange, make_version_range
from hil.controller.workloads.gate.bisection.suspect import SuspectRun
from hil.controller.workloads.gate.plan import GateCase
from hil.core.board_config import BoardConfig
from hil.core.runtimes import RUNTIMES, RuntimeInfo
from hil.errors import UsageError


class CompilerAxis(BisectAxis):
    """Versions of a compiler. hil compiles the judged model with each.

    Args:
        versions: oldest first.
    """

    name = "compiler"

    def __init__(self, versions: Sequence[str], context: RunContext) -> None:
        self._versions = versions
        self._context = context
        self._open = contextlib.ExitStack()
        # Package and version -> context whose processes import this version.
        self._contexts: dict[tuple[str, str], RunContext] = {}

    @contextlib.contextmanager
    def open_search(self) -> Iterator[None]:
        """End the processes of all versions at the end."""
        with self._open:
            self._open.callback(self._contexts.clear)
            yield

    def find_candidates(self, case: GateCase, verdict: GateVerdict) -> CandidateRange:
        """Return the versions."""
        info = RUNTIMES.get(case.new.key.runtime)
        if info is None or not info.compiler_package:
            raise UsageError(
                f"hil cannot install compilers for the runtime {case.new.key.runtime}",
                hint="pass --bisect COMMAND; COMMAND builds the program with version HIL_COMPILER",
            )
        if case.new.tools.compiler.partition(" ")[0] != info.compiler:
            raise UsageError(f"hil did not compile the program of {case.new.run}", hint="pass --bisect COMMAND")
        if case.old is not None and case.old.program == case.new.program:
            raise UsageError("both measurements ran the same program, so the compiler cannot be the cause")
        return make_version_range("compiler", self._versions)

    def prepare(self, candidate: GateCandidate, suspects: Sequence[SuspectRun], folder: Path) -> str:
        """Install a version."""
        try:
            for package in dict.fromkeys(_find_runtime(one).compiler_package for one in suspects):
                if (package, candidate.value) not in self._contexts:
                    context = self._make_context(package, candidate.value, folder / "install.log")
                    self._contexts[package, candidate.value] = context
        except UsageError as error:
            return error.message
        return ""

    def make_program(self, suspect: SuspectRun, candidate: GateCandidate, folder: Path, config: BoardConfig) -> Case:
        """Compile the judged model with a version of the compiler."""
        context = self._contexts[_find_runtime(suspect).compiler_package, candidate.value]
        case = suspect.begin_judged(folder)
        return replace(suspect.runner, context=context).compile(case, config)

    def _make_context(self, package: str, version: str, log: Path) -> RunContext:
        """Return a context with a version of the compiler. Raises UsageError if pip cannot install it."""
        if require_version(package) == version:
            return self._context
        folder = install_compiler(package, version, cache=self._context.cache, log=log)
        workers = self._context.isolated.workers
        isolated = self._open.enter_context(Isolated(workers, folders=[str(folder)]))
        return RunContext(self._context.cache, isolated)


def _find_runtime(suspect: SuspectRun) -> RuntimeInfo:
    return RUNTIMES[suspect.case.new.key.runtime]
