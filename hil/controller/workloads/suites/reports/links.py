"""Links from reports to a case's files: the picture of the difference, tensors, logs, IR, profiles.

Links are relative to the run's directory, so that they remain valid if the directory is moved. Links to other
directories (``--debug-ir``, ``--profile``) remain valid if both directories are moved together.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hil.compare.verdict import compare_output
from hil.controller.analysis.profile.store import TRACE
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.outcomes import classify_outcome
from hil.controller.storage.paths import is_folder, path_exists
from hil.controller.storage.runs import COMPILE_FAILURE
from hil.controller.workloads.suites.reports.results import SuiteResults
from hil.core.files import resolve_within
from hil.core.npy import load_npy
from hil.core.variables import read_count
from hil.errors import HilError

PICTURE = "difference.png"
# Maximum bytes in the tensors of a picture. A picture takes half a second and 100 KB.
_LARGEST = 256 << 20


def iter_links(run: SuiteResults, record: CaseRecord, base: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (kind, path) for all existing files and directories of a case.

    Args:
        base: the report's directory, to which paths are relative; None is the run's directory.
    """
    if base is not None and base != run.folder:
        for what, where in iter_links(run, record):
            yield what, Path(os.path.relpath(run.folder / where, base)).as_posix()
        return
    if record.folder and is_folder(run.folder / record.folder):
        folder = run.folder / record.folder
        # Symbolic links point to profiles, which the loop below lists.
        found = [path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
        for name in [*([PICTURE] if path_exists(folder / PICTURE) else []), *sorted(found)]:
            yield ("difference" if name == PICTURE else name), f"{record.folder}/{name}"
        if is_folder(folder / "logs" / COMPILE_FAILURE):
            yield "compiler failure", f"{record.folder}/logs/{COMPILE_FAILURE}"
    for what, where in record.directories.items():
        if path_exists(run.folder / where / TRACE):
            yield f"{what} trace", f"{where}/{TRACE}"
        if is_folder(run.folder / where):
            yield what, where


def draw_pictures(run: SuiteResults) -> None:
    """Draw the differences of the failing cases' worst outputs, as ``hil compare --plot`` does. Requires matplotlib.

    Only the first 20 failing cases are drawn, or the number in the environment variable HIL_PICTURES. The function
    skips large tensors, which users can draw with ``hil compare``.
    """
    failing = [
        record for record in run.records if classify_outcome(record.outcome) == "fail" and record.diff and record.folder
    ]
    for record in failing[: read_count("HIL_PICTURES")]:
        if find_spec("matplotlib") is None:
            return
        # Skip unreadable or undrawable values; the report contains their numbers.
        with contextlib.suppress(HilError, OSError, ValueError):
            picture = resolve_within(run.folder, run.folder / record.folder / PICTURE)
            if not picture.exists():
                _draw_picture(picture, record.diff)


def _draw_picture(picture: Path, command: str) -> None:
    """Draw the comparison of a command from :attr:`CaseRecord.diff`. The tensors are in the picture's directory."""
    from hil.controller.analysis.plot import plot_difference

    _, _, *words = shlex.split(command)
    files = [picture.parent / Path(word).parent.name / Path(word).name for word in words[:2]]
    if sum(file.stat().st_size for file in files) > _LARGEST:
        return
    given = dict(zip(words[2::2], words[3::2], strict=False))
    rtol, atol = (float(given[name]) if name in given else None for name in ("--rtol", "--atol"))
    actual, reference = (load_npy(file, mmap=True) for file in files)
    name = files[1].stem.partition("-")[2]
    found = compare_output(name, actual, reference, rtol=rtol, atol=atol, allow_blind=("*",))
    plot_difference(picture, name, actual, reference, found)
