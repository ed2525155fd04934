"""Origin of a record: the user's labels, and the branch and commit of the source tree."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hil.controller.records.outputs import Origin

# Variable with labels for all stored records, separated by commas.
LABELS = "HIL_LABELS"
# Variables of CI systems with the branch name, because CI checks out only a commit. For a pull request, the source
# branch comes before the merge branch.
_BRANCH = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_BRANCH")
# One command for the commit and the branch (or HEAD), because each call takes a few milliseconds.
_GIT = ("git", "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
_GIT_SECONDS = 5.0
_STATUS = ("git", "status", "--porcelain", "--untracked-files=no")
_STATUS_SECONDS = 30.0
_given: ContextVar[Origin | None] = ContextVar("origin", default=None)
_typed: ContextVar[str] = ContextVar("typed", default="")


def find_origin(labels: Iterable[str] = ()) -> Origin:
    """Return the origin for a new record.

    Branch and commit describe the current git working tree. Both are "" without a working tree, without git, or if
    the branch is unknown.

    Args:
        labels: The user's labels. The labels in the variable :data:`LABELS` are appended.
    """
    if (known := _given.get()) is not None:
        return known
    more = os.environ.get(LABELS, "").split(",")
    branch, commit = _read_tree()
    # Imported here because every command imports this module.
    from hil.controller.records.outputs import Origin

    return Origin(labels=_clean_labels([*labels, *more]), branch=branch, commit=commit)


def find_request_origin(request: Mapping[str, Any]) -> Origin:
    """Return the origin for a run or suite, with the labels of the request."""
    settings = request.get("settings")
    holder = settings if isinstance(settings, Mapping) else request
    return find_origin(holder.get("labels") or ())


@contextlib.contextmanager
def use_origin(origin: Origin) -> Iterator[None]:
    """Use this origin for records within the context. A farm host runs jobs that other users submitted."""
    token = _given.set(origin)
    try:
        yield
    finally:
        _given.reset(token)


def note_typed(command: str) -> None:
    """Set the current command for :func:`get_typed_command`."""
    _typed.set(command)


def get_typed_command() -> str:
    """Return the user's command, which repeats the work; "" if hil is used as a library."""
    return _typed.get() if _given.get() is None else ""


def format_origin(origin: Origin | None) -> str:
    """Format an origin: ``nightly, main 1a2b3c4d5``; "" if the record has none."""
    if origin is None:
        return ""
    tree = " ".join(filter(None, (origin.branch, origin.commit[:9])))
    return ", ".join([*origin.labels, *filter(None, [tree])])


def _clean_labels(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(one.strip() for one in texts if one.strip()))


def is_tree_dirty() -> bool | None:
    """Return True if the working tree has uncommitted changes of tracked files; None if unknown."""
    found = _call_git(_STATUS, _STATUS_SECONDS)
    return None if found is None else bool(found)


def _read_tree() -> tuple[str, str]:
    """Return branch and commit of the working tree."""
    lines = (_call_git(_GIT, _GIT_SECONDS) or "").splitlines()
    if len(lines) != 2:
        return "", ""
    commit, branch = lines
    if branch == "HEAD":
        branch = next(filter(None, map(os.environ.get, _BRANCH)), "")
    return branch, commit


def _call_git(words: tuple[str, ...], timeout: float) -> str | None:
    """Return the output of a git command, or None without a working tree or after an error."""
    try:
        here = Path.cwd()
        if "GIT_DIR" not in os.environ and not any((folder / ".git").exists() for folder in (here, *here.parents)):
            return None  # no working tree: git would fail
        found = subprocess.run(words, capture_output=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return None if found.returncode else found.stdout.decode(errors="replace")
