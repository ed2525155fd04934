"""Where a record comes from: the labels that its user gave it, and the source tree that was worked in."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

# Labels of everything that is stored, with commas between.
LABELS = "HIL_LABELS"
# What systems of continuous integration call the branch, of which they check out a commit alone: of a pull request its
# own branch before the one that is made of both.
_BRANCH = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_BRANCH")
# One call, a few milliseconds: the commit, and the branch or HEAD.
_GIT = ("git", "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
_GIT_S = 5.0
_given: ContextVar[Mapping[str, Any] | None] = ContextVar("origin", default=None)
_typed: ContextVar[str] = ContextVar("typed", default="")


def origin_of(labels: Iterable[str] = ()) -> dict[str, Any]:
    """What a new record says of where it comes from: ``labels``, ``branch``, ``commit``.

    Branch and commit are those of the git working tree that one stands in: "" where there is none, no git, or no branch
    that anybody knows.

    Args:
        labels: the user's; those of :data:`LABELS` follow.
    """
    if (known := _given.get()) is not None:
        return {"labels": _labels(known.get("labels")), **{key: str(known.get(key) or "") for key in _TREE}}
    more = os.environ.get(LABELS, "").split(",")
    branch, commit = _tree()
    return {"labels": _labels([*labels, *more]), "branch": branch, "commit": commit}


_TREE = ("branch", "commit")


def origin_of_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """The same, of what a run or a suite was asked to do: the labels are among its settings."""
    settings = request.get("settings")
    holder = settings if isinstance(settings, Mapping) else request
    return origin_of(holder.get("labels") or ())


@contextlib.contextmanager
def coming_from(origin: Mapping[str, Any]) -> Iterator[None]:
    """Within this, records come from there, whatever is here: a farm's host runs what somebody else submitted."""
    token = _given.set(origin)
    try:
        yield
    finally:
        _given.reset(token)


def note_typed(command: str) -> None:
    """Note the command that runs now, for :func:`typed_command`."""
    _typed.set(command)


def typed_command() -> str:
    """The command that the user gave, which does the same again; "" where the library was called by somebody else."""
    return _typed.get() if _given.get() is None else ""


def origin_text(origin: Any) -> str:
    """``nightly, main 1a2b3c4d5``: an origin in a line; "" where a record says nothing of it."""
    if not isinstance(origin, Mapping):
        return ""
    tree = " ".join(filter(None, (str(origin.get("branch") or ""), str(origin.get("commit") or "")[:9])))
    return ", ".join([*_labels(origin.get("labels")), *filter(None, [tree])])


def _labels(values: Any) -> list[str]:
    texts = values if isinstance(values, (list, tuple)) else ()
    return list(dict.fromkeys(one.strip() for one in texts if isinstance(one, str) and one.strip()))


def _tree() -> tuple[str, str]:
    """Branch and commit of the working tree."""
    try:
        here = Path.cwd()
        if "GIT_DIR" not in os.environ and not any((folder / ".git").exists() for folder in (here, *here.parents)):
            return "", ""  # as git would find out too
        found = subprocess.run(_GIT, capture_output=True, timeout=_GIT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    lines = found.stdout.decode(errors="replace").splitlines()
    if found.returncode or len(lines) != 2:
        return "", ""
    commit, branch = lines
    if branch == "HEAD":
        branch = next(filter(None, map(os.environ.get, _BRANCH)), "")
    return branch, commit
