"""The profile that a command line means: a folder, a trace, or a stored run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from hil.controller.analysis.profile.store import HEAD, TABLE, TRACE, read_profile
from hil.controller.storage.runs import RunStore
from hil.errors import UsageError, did_you_mean

_HINT = "name a profile's folder, a trace file, or a stored run; hil run --profile DIR makes a profile"


def find_profile(text: str, case: str = "", *, store: RunStore | None = None) -> Path:
    """The profile's folder, or the trace file, that a text means.

    Args:
        text: a folder of one profile or of several, a trace file, or a stored run's id, the beginning of it, or
            ``latest``.
        case: which one, where there are several.
        store: of the stored runs (default: hil-runs).

    Raises:
        UsageError: there is none, or several and none of them was named.
    """
    path = Path(text)
    if path.is_file():
        if case:
            raise UsageError(f"{path} is one trace: --case {case!r} has nothing to choose from")
        return path
    store = store or RunStore()
    if path.is_dir() and not (path / "run.json").is_file():
        # One that held a single profile may hold those of several cases by now.
        found = ({path.resolve().name: path} if _is_profile(path) else {}) | _below(path, "")
        return _chosen(text, found, case)
    if not path.exists():
        known = [row.parent.name for row in store.root.glob("*/run.json")]
        if text != "latest" and not any(one.startswith(text) for one in known):
            hint = did_you_mean(text, [*known, "latest"]) + _HINT
            raise UsageError(f"{text!r} is no file, no folder and no run in {store.root}", hint=hint)
    run = store.open(text)
    return _chosen(run.id, _below(run.folder, "profile"), case)


def trace_of(profile: Path) -> Path:
    """The trace of what :func:`find_profile` found.

    Raises:
        UsageError: the folder has none.
    """
    if profile.is_file():
        with profile.open("rb") as file:
            # A gzip file, or a packet: field 1 of a Trace.
            if not file.read(2).startswith((b"\x1f\x8b", b"\x0a")):
                raise UsageError(f"{profile} is no trace of Perfetto's", hint=_HINT)
        return profile
    if not (profile / TRACE).is_file():
        raise UsageError(f"{profile} has no trace ({TRACE})", hint="hil profile show reads its rows")
    return profile / TRACE


def folder_of(profile: Path) -> Path:
    """The folder of what :func:`find_profile` found: that of a trace which lies beside its rows.

    Raises:
        UsageError: it is a trace alone, or the folder has no rows.
    """
    folder = profile.parent if profile.is_file() else profile
    if not (folder / HEAD).is_file():
        what = f"{profile} is a trace alone" if profile.is_file() else f"{folder} has a trace alone"
        hint = f"its folder is needed, with {TABLE} and {HEAD}; hil profile open and query read traces"
        raise UsageError(f"{what}: there is no {HEAD} beside it", hint=hint)
    return folder


def title_of(profile: Path) -> str:
    """What to call what :func:`find_profile` found: the model and the board, or the file's name."""
    # A damaged record is no reason not to show the trace.
    with contextlib.suppress(UsageError):
        head = read_profile(folder_of(profile))
        return f"{head.model} on {head.board}"
    return profile.name


def _is_profile(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (HEAD, TRACE))


def _below(folder: Path, inner: str) -> dict[str, Path]:
    """Case -> its profile, of the folders right below."""
    return {path.name: path / inner for path in sorted(folder.iterdir()) if _is_profile(path / inner)}


def _chosen(where: str, found: Mapping[str, Path], case: str) -> Path:
    if case and case not in found:
        hint = did_you_mean(case, found) + (f"there are: {', '.join(found)}" if found else _HINT)
        raise UsageError(f"{where} has no profile of a case {case!r}", hint=hint)
    if not found:
        raise UsageError(f"{where} has no profile", hint=_HINT)
    if not case and len(found) > 1:
        raise UsageError(f"{where} has profiles of several cases: {', '.join(found)}", hint="name one with --case NAME")
    return found[case] if case else next(iter(found.values()))
