"""The profiles that a run was asked for: of a case's compilation, and of its run on the board."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hil.controller.analysis.profile.collect import RAW, collect
from hil.controller.analysis.profile.compile_time import DISPATCHES, EXECUTABLES, PASSES, profile_compile
from hil.controller.analysis.profile.store import HEAD, TABLE, TRACE
from hil.controller.analysis.profile.trace import write_trace
from hil.controller.pipeline.case import Case, Workshop
from hil.controller.pipeline.options import COMPILE_TIMEOUT_S
from hil.controller.storage.runs import storing
from hil.errors import HilError, StorageError, UsageError

# By what a folder that holds a profile of each kind is known, a whole one or one that was interrupted.
_KNOWN_BY = {"run": (HEAD, TABLE, RAW), "compile": (PASSES, DISPATCHES, EXECUTABLES)}


def check_folder(folder: Path, kind: str) -> None:
    """Make a profile's folder before anything runs; an older profile of its kind in it may be replaced.

    Args:
        folder: the folder.
        kind: ``run`` or ``compile``.

    Raises:
        UsageError: it cannot be made, or holds anything else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UsageError(f"{folder} cannot be a profile's folder: {error.strerror or error}") from error
    if held and [one for one, names in _KNOWN_BY.items() if not held.isdisjoint(names)] != [kind]:
        raise UsageError(f"{folder} holds other things already", hint="name a new folder for the profile, or empty it")


def write_profiles(
    case: Case, folders: Mapping[str, Path], *, run_id: str, shop: Workshop
) -> Iterator[tuple[Mapping[str, Any], ...]]:
    """Write the profiles of a case that has ended. What cannot be had is a note: the case keeps its outcome.

    Args:
        case: the case.
        folders: ``compile`` and ``run`` -> where that profile goes.
        run_id: the profiles' name. A link in the case's folder leads to the one of the run.
        shop: where compilers run.

    Yields:
        For the record: ``kind``, ``folder`` and ``notes`` of each; before any is written, and after each.
    """
    write = {"compile": _compile, "run": _run}
    # What is told where Ctrl-C leaves it at that.
    interrupted = "the profile is not whole: it was interrupted"
    profiles = [{"kind": kind, "folder": str(folder), "notes": [interrupted]} for kind, folder in folders.items()]
    yield tuple(profiles)
    for number, (kind, folder) in enumerate(folders.items()):
        try:
            notes = write[kind](case, folder, run_id, shop)
        except HilError as error:
            notes = [f"the profile is not whole: {error.message}"]
        profiles[number] = {**profiles[number], "notes": notes}
        yield tuple(profiles)


def _compile(case: Case, folder: Path, run_id: str, shop: Workshop) -> list[str]:
    if case.model is None or case.artifact is None:
        return ["no profile of the compiler: the model was not compiled"]
    made = profile_compile(
        case.model,
        runtime=case.artifact.runtime,
        flags=case.artifact.flags,
        folder=folder,
        cache=shop.cache,
        isolated=shop.isolated,
        timeout=COMPILE_TIMEOUT_S,
        log=case.folder / "logs" / "compile-profile.log",
    )
    write_trace([], folder / TRACE, compile_profiles=[made])
    return list(made.notes)


def _run(case: Case, folder: Path, run_id: str, shop: Workshop) -> list[str]:
    if case.capture is None:
        return ["no profile of the run: the model did not run"]
    notes = collect(case, case.capture, folder, run=run_id, shop=shop)
    link = case.folder / "profile"
    try:
        with storing(link):
            link.unlink(missing_ok=True)
            link.symlink_to(folder.resolve(), target_is_directory=True)
    except StorageError as error:
        notes.append(f"the stored run does not know of its profile: {error.message}")
    return notes
