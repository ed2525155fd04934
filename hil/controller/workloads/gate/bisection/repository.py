"""Check out commits of a git repository in a temporary worktree."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hil.controller.records.decisions.gate import GateCandidate
from hil.controller.storage.runs import convert_write_errors
from hil.controller.storage.screen.texts import line
from hil.controller.workloads.gate.bisection.shell import make_environment
from hil.core.processes import exit_text
from hil.core.scratch import make_temporary_folder
from hil.errors import UsageError

_GIT_SECONDS = 600.0
# Git command that does not run the repository's hooks, which are not meant for temporary checkouts.
_GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "log.showSignature=false", "-c", "advice.detachedHead=false")
_KEYED = re.compile(r"(.*\.npz)(:[^/]*)", re.S)


@dataclass(frozen=True)
class GitRepository:
    """A repository.

    Attributes:
        root: top directory of the user's work tree, which is never changed.
        here: base directory for relative paths of stored runs.
    """

    root: Path
    here: Path

    @classmethod
    def find(cls, here: Path) -> GitRepository:
        """Return the repository that contains a directory. Raises UsageError if there is none."""
        here = here.resolve()
        hint = "run hil gate --bisect in the work tree of the repository"
        return cls(Path(_call_git(here, "rev-parse", "--show-toplevel", hint=hint).rstrip("\n")).resolve(), here)

    def list_commits(self, good: str, bad: str) -> list[GateCandidate]:
        """Return the commits to search, oldest first: a start commit, and the commits that only ``bad`` contains.

        The start commit is ``good`` if ``good`` is an ancestor of ``bad``. Otherwise it is the commit at which the
        branches separate.

        Raises:
            UsageError: a commit is not in the repository, or ``good`` contains ``bad``.
        """
        ends = [self.resolve(commit) for commit in (good, bad)]
        words = ("log", "--first-parent", "--reverse", "-z", "--format=%H %P%n%s", f"{ends[0]}..{ends[1]}", "--")
        rows = [row.partition("\n") for row in _call_git(self.root, *words).split("\0") if row]
        if not rows:
            raise UsageError(
                f"no commits to search: the good commit {ends[0][:9]} contains the bad commit {ends[1][:9]}"
            )
        parents = rows[0][0].split()[1:]
        if not parents:
            raise UsageError(f"commits {ends[0][:9]} and {ends[1][:9]} have no common ancestor in this clone")
        subject = _call_git(self.root, "log", "-1", "--format=%s", parents[0], "--").rstrip("\n")
        found = [(parents[0], subject), *((head.split()[0], text) for head, _, text in rows)]
        return [GateCandidate(commit=commit, subject=line(text)) for commit, text in found]

    def list_ancestors(self, commit: str) -> frozenset[str] | None:
        """Return a commit and the ancestors, or None if the clone does not contain all of them.

        Raises:
            UsageError: the commit is not in the repository.
        """
        if _call_git(self.root, "rev-parse", "--is-shallow-repository").strip() != "false":
            return None
        return frozenset(_call_git(self.root, "rev-list", self.resolve(commit), "--").split())

    def is_tracked(self, path: Path) -> bool:
        """Return whether the user's work tree tracks a file."""
        return bool(_call_git(self.root, "ls-files", "-z", "--", f":(literal){path}"))

    def export_file(self, commit: str, name: str, folder: Path) -> Path:
        """Write a file of a commit to a directory, with the same file name.

        Raises:
            UsageError: the commit does not contain the file.
        """
        path = folder / Path(name).name
        with convert_write_errors(folder), path.open("wb") as file:
            _call_git(self.root, "cat-file", "blob", f"{self.resolve(commit)}:{name}", out=file)
        return path

    @contextlib.contextmanager
    def open_worktree(self) -> Iterator[CommitTree]:
        """Yield a temporary worktree, and remove it at the end."""
        with make_temporary_folder("gate-") as folder:
            _call_git(self.root, "worktree", "prune")  # forget the removed worktrees of killed processes
            place = Path(folder) / self.root.name
            try:
                yield CommitTree(self, place)
            finally:
                with contextlib.suppress(UsageError):
                    _call_git(self.root, "worktree", "remove", "--force", "--force", str(place))
        with contextlib.suppress(UsageError):
            _call_git(self.root, "worktree", "prune")

    def resolve(self, commit: str) -> str:
        """Return the full hash of a commit. The text comes from a record, so git must not parse it as an option."""
        words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
        try:
            lines = _call_git(self.root, *words).split()
        except UsageError:
            lines = []
        if not commit or not lines:
            raise UsageError(
                f"commit {commit[:40]!r} is not in {self.root}", hint="fetch the whole history: git fetch --unshallow"
            )
        return lines[-1]


@dataclass(frozen=True)
class CommitTree:
    """A temporary worktree for the commits of a repository."""

    repository: GitRepository
    folder: Path

    def check_out(self, commit: str) -> None:
        """Check out a commit, and delete all other files.

        Raises:
            UsageError: the commit is not in the repository, or git fails.
        """
        commit = self.repository.resolve(commit)
        if self.folder.exists():
            _call_git(self.folder, "checkout", "--quiet", "--force", "--detach", commit, "--")
            _call_git(self.folder, "clean", "-ffdxq")
        else:
            words = ("worktree", "add", "--quiet", "--force", "--detach", str(self.folder), commit)
            _call_git(self.repository.root, *words)

    def find_model(self, name: str) -> Path:
        """Return a model's path in the worktree.

        Args:
            name: path relative to the repository, from a record.

        Raises:
            UsageError: the commit has no such file.
        """
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or not (self.folder / path).exists():
            raise UsageError(f"{name} is missing in the commit")
        return self.folder / path

    def locate_tensor(self, text: str) -> str:
        """Return the text of ``--input`` or ``--expected`` for the worktree.

        For a tracked file, the text names the commit's version. Other files exist only in the user's work tree.

        Raises:
            UsageError: the commit does not have a tracked file.
        """
        found = _KEYED.fullmatch(text)
        body, key = (found[1], found[2]) if found else (text, "")
        for start in (0, *(spot.end() for spot in re.finditer("[=@]", body))):
            path = Path(os.path.normpath(self.repository.here / body[start:]))
            if not body[start:]:
                continue
            if path.is_relative_to(self.repository.root):
                own = path.relative_to(self.repository.root)
                if (self.folder / own).is_file():
                    return f"{body[:start]}{self.folder / own}{key}"
                if path.is_file() and self.repository.is_tracked(own):
                    raise UsageError(f"{own} is missing in the commit")
            if path.is_file():
                return f"{body[:start]}{path}{key}"
        return text


def _call_git(folder: Path, *words: str, hint: str = "", out: IO[bytes] | None = None) -> str:
    """Return the output of a git command, or write it to a file. Raises UsageError if the command fails."""
    try:
        found = subprocess.run(
            [*_GIT, *words],
            cwd=folder,
            env=make_environment(),
            stdin=subprocess.DEVNULL,
            stdout=out or subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UsageError(f"cannot call git: {error}", hint=hint) from error
    if found.returncode:
        lines = found.stderr.decode(errors="replace").strip().splitlines() or [exit_text(found.returncode)]
        raise UsageError(f"git {words[0]} failed: {line(lines[-1])}", hint=hint)
    return (found.stdout or b"").decode(errors="replace")
