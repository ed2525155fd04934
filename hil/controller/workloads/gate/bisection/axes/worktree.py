"""Axes whose candidates a command builds in a temporary git worktree: commits, and versions of a compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hil.controller.pipeline.case import Case
from hil.controller.records.decisions.gate import GateCandidate, GateVerdict
from hil.controller.workloads.gate.bisection.axes.axis import BisectAxis, CandidateRange, make_version_range
from hil.controller.workloads.gate.bisection.repository import CommitTree, GitRepository
from hil.controller.workloads.gate.bisection.shell import run_command
from hil.controller.workloads.gate.bisection.suspect import SuspectRun
from hil.controller.workloads.gate.plan import GateCase
from hil.core.board_config import BoardConfig
from hil.errors import UsageError

# Environment of build commands: the tested commit, and the version of the compiler.
COMMIT_VARIABLE = "HIL_COMMIT"
COMPILER_VARIABLE = "HIL_COMPILER"
_SHORT = 9


class WorktreeAxis(BisectAxis):
    """An axis with builds in a worktree.

    Args:
        command: build command for the shell; "" builds nothing.
        timeout_s: maximum duration of a build in seconds.
    """

    def __init__(self, repository: GitRepository, command: str, timeout_s: float) -> None:
        self.repository = repository
        self._command = command
        self._timeout_s = timeout_s
        self._tree: CommitTree | None = None

    @contextlib.contextmanager
    def open_search(self) -> Iterator[None]:
        """Create the worktree, and remove it at the end."""
        with self.repository.open_worktree() as self._tree:
            yield

    def make_program(self, suspect: SuspectRun, candidate: GateCandidate, folder: Path, config: BoardConfig) -> Case:
        """Compile the model in the worktree. Inputs that the repository contains have the content of the commit."""
        assert self._tree is not None
        model = self._tree.find_model(suspect.case.new.key.model)
        case = suspect.begin(model, self._tree.locate_tensor, folder)
        return suspect.runner.compile(case, config)

    def build(self, commit: str, variables: Mapping[str, str], folder: Path) -> str:
        """Check out a commit, and run the command there. Return the reason if this fails, or ""."""
        assert self._tree is not None
        try:
            self._tree.check_out(commit)
        except UsageError as error:
            return error.message
        if not self._command.strip():
            return ""
        return run_command(
            self._command,
            self._tree.folder,
            {COMMIT_VARIABLE: commit, **variables},
            title="the build",
            timeout_s=self._timeout_s,
            log=folder / "build.log",
        )


class CommitAxis(WorktreeAxis):
    """The commits between both measurements."""

    name = "commit"
    verdicts = ("broken", "regressed")

    def find_candidates(self, case: GateCase, verdict: GateVerdict) -> CandidateRange:
        """Return the commits between both measurements, oldest first."""
        assert case.old is not None
        good, bad = case.old.source.commit, case.new.source.commit
        if not good or not bad:
            raise UsageError("a measurement does not name its commit")
        commits = self.repository.list_commits(good, bad)
        return CandidateRange(
            commits,
            first=f"the commit {commits[0].commit[:_SHORT]} before the change",
            last=f"the judged commit {commits[-1].commit[:_SHORT]}",
            where=" in a clean checkout",
            # If the first commit was not measured, it must pass a test.
            needs_good=not commits[0].commit.startswith(good),
        )

    def prepare(self, candidate: GateCandidate, suspects: Sequence[SuspectRun], folder: Path) -> str:
        """Build a commit."""
        return self.build(candidate.commit, {}, folder)


class BuiltCompilerAxis(WorktreeAxis):
    """Versions of a compiler with which the command builds the judged commit.

    Args:
        versions: oldest first.
    """

    name = "compiler"

    def __init__(self, repository: GitRepository, command: str, timeout_s: float, versions: Sequence[str]) -> None:
        super().__init__(repository, command, timeout_s)
        self._versions = versions

    def find_candidates(self, case: GateCase, verdict: GateVerdict) -> CandidateRange:
        """Return the versions."""
        if not case.new.source.commit:
            raise UsageError("the judged measurement does not name its commit")
        return make_version_range("compiler", self._versions)

    def prepare(self, candidate: GateCandidate, suspects: Sequence[SuspectRun], folder: Path) -> str:
        """Build the judged commit with a version of the compiler. All suspects of a gate have the same commit."""
        return self.build(suspects[0].case.new.source.commit, {COMPILER_VARIABLE: candidate.value}, folder)
