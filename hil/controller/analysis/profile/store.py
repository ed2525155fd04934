"""Write profiles to directories, read them back, and find a profile's directory."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, overload

from hil.controller.analysis.profile.rows import read_csv, write_csv, write_parquet
from hil.controller.analysis.profile.trace import write_trace
from hil.controller.records.base import make_record
from hil.controller.records.measurements.profile import ProfileHead, StoredSample
from hil.controller.storage.paths import is_file, is_folder, path_exists
from hil.controller.storage.runs import RunStore, convert_write_errors, write_json
from hil.core.bounded_json import read_json
from hil.core.cancellation import check_cancelled
from hil.core.files import open_file
from hil.core.timeline import OpRow, Profile, Sample
from hil.errors import UsageError, did_you_mean

SCHEMA: Literal[1] = 1
HEAD = "profile.json"
TABLE = "ops.csv"
PARQUET = "ops.parquet"
TRACE = "trace.pftrace.gz"

_HINT = "pass a profile directory, a trace file or a stored run; create a profile with hil run --profile DIR"


class StoredRows(Sequence[OpRow]):
    """Rows of a directory's ``ops.csv``. Each pass reads the file, because a million rows would need too much memory.

    Raises:
        UsageError: while reading: the table is missing, truncated, or belongs to a different profile.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[OpRow]:
        found = 0
        for row in read_csv(self.path):
            check_cancelled()
            found += 1
            yield row
        if found != self._count:
            message = f"{self.path} has {found} rows, but {HEAD} expects {self._count}"
            raise UsageError(message, hint="a file was changed or truncated: profile again")

    @overload
    def __getitem__(self, index: int) -> OpRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[OpRow]: ...
    def __getitem__(self, index: int | slice) -> OpRow | Sequence[OpRow]:
        wanted = range(self._count)[index]
        if isinstance(wanted, int):
            return next(itertools.islice(self, wanted, None))
        if wanted.step < 0:
            return list(self)[index]
        return list(itertools.islice(self, wanted.start, wanted.stop, wanted.step))


def write_profile(profile: Profile, folder: Path) -> None:
    """Write a profile to a directory, which is created if needed. Replaces an older profile's files.

    The table and ``profile.json`` are written first, so that they are readable even if writing the trace fails.
    """
    with convert_write_errors(folder, "--profile"):
        folder.mkdir(parents=True, exist_ok=True)
        # Delete these files, which must not remain next to the table of another profile.
        for name in (HEAD, TRACE, PARQUET):
            (folder / name).unlink(missing_ok=True)
        count = write_csv(profile.rows, folder / TABLE)
        write_json(folder / HEAD, _record_head(profile, count).to_json(), option="--profile")
        write_trace([profile], folder / TRACE)
        if importlib.util.find_spec("pyarrow") is not None:
            write_parquet(profile.rows, folder / PARQUET)


def read_profile(folder: Path) -> Profile:
    """Read the profile in a directory; rows are read from the table on demand.

    Raises:
        UsageError: the directory does not exist, contains no complete profile, or was written by a newer hil.
    """
    head = _read_head(folder)
    return Profile(
        run=head.run,
        model=head.model,
        board=head.board,
        runtime=head.runtime,
        rows=StoredRows(folder / TABLE, head.rows),
        stages=head.stages,
        transfers=head.transfers,
        calls=head.calls,
        counters=[Sample(one.at_ns, one.name, float(one.value), one.unit) for one in head.counters],
        clock=head.clock,
        console=head.console,
        notes=tuple(head.notes),
        device=head.device,
        ticks=head.ticks,
        energy=tuple(head.energy),
        stack=head.stack,
        flags=tuple(head.flags),
    )


def _record_head(profile: Profile, rows: int) -> ProfileHead:
    return ProfileHead(
        schema=SCHEMA,
        run=profile.run,
        model=profile.model,
        board=profile.board,
        runtime=profile.runtime,
        rows=rows,
        stages=list(profile.stages),
        transfers=list(profile.transfers),
        calls=list(profile.calls),
        counters=[StoredSample(**vars(sample)) for sample in profile.counters],
        clock=profile.clock,
        console=list(profile.console),
        notes=list(profile.notes),
        device=profile.device,
        ticks=profile.ticks,
        energy=list(profile.energy),
        stack=dict(profile.stack),
        flags=list(profile.flags),
    )


def _read_head(folder: Path) -> ProfileHead:
    path = folder / HEAD
    try:
        document = read_json(path)
    except FileNotFoundError as error:
        what = f"no profile in {folder}" if folder.is_dir() else f"directory {folder} not found"
        raise UsageError(what, hint="create a profile with hil run MODEL --profile DIR") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged or not a profile: {error}", hint="profile again") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise UsageError(
            f"{folder} was written by a newer hil (schema {schema})", hint="read the profile with the newer hil"
        )
    try:
        return make_record(document, ProfileHead)
    except UsageError as error:
        raise UsageError(f"{path} is damaged or not a profile: {error.message}", hint="profile again") from error


def find_profile(text: str, case: str = "", *, store: RunStore | None = None) -> Path:
    """Find the profile directory or trace file that the user named.

    Args:
        text: a directory with profiles, a trace file, a stored run's id or id prefix, or ``latest``.
        case: the case's name, required if ambiguous.

    Raises:
        UsageError: no profile was found, or ``case`` does not select a single profile.
    """
    path = Path(text)
    if is_file(path):
        if case:
            raise UsageError(f"--case {case!r} requires a directory or a run, got trace file {path}")
        return path
    store = store or RunStore()
    if is_folder(path) and not is_file(path / "run.json"):
        # A directory with a single profile may also contain the profiles of several cases, from a later run.
        found = ({path.resolve().name: path} if _is_profile(path) else {}) | _find_case_profiles(path, "")
        return _select_profile(text, found, case)
    if not path_exists(path):
        known = [row.parent.name for row in store.root.glob("*/run.json")]
        if text != "latest" and not any(one.startswith(text) for one in known):
            hint = did_you_mean(text, [*known, "latest"]) + _HINT
            raise UsageError(f"{text!r} is not a file, a directory or a run in {store.root}", hint=hint)
    run = store.open(text)
    return _select_profile(run.id, _find_case_profiles(run.folder, "profile"), case)


def trace_of(profile: Path) -> Path:
    """Return the trace file of a profile from :func:`find_profile`.

    Raises:
        UsageError: the trace is missing, unreadable or not a Perfetto trace.
    """
    if profile.is_file():
        try:
            with open_file(profile) as file:
                head = file.read(2)
        except OSError as error:
            raise UsageError(f"{profile} cannot be read: {error.strerror}") from error
        else:
            # A gzip file, or a packet: field 1 in a Trace.
            if not head.startswith((b"\x1f\x8b", b"\x0a")):
                raise UsageError(f"{profile} is not a Perfetto trace", hint=_HINT)
        return profile
    if not (profile / TRACE).is_file():
        raise UsageError(f"{profile} has no trace ({TRACE})", hint="read the rows with hil profile show")
    return profile / TRACE


def find_folder(profile: Path) -> Path:
    """Return the directory with the rows for a profile from :func:`find_profile`.

    Raises:
        UsageError: the profile is only a trace.
    """
    folder = profile.parent if profile.is_file() else profile
    if not (folder / HEAD).is_file():
        what = f"{profile} is only a trace" if profile.is_file() else f"{folder} has only a trace"
        hint = f"pass a directory with {TABLE} and {HEAD}, or read the trace with hil profile open or query"
        raise UsageError(f"{what}: missing {HEAD}", hint=hint)
    return folder


def read_title(profile: Path) -> str:
    """Return the title of a profile from :func:`find_profile`: model and board, or the file name."""
    # Ignore errors, because the trace can be shown even if ``profile.json`` is damaged.
    with contextlib.suppress(UsageError):
        head = read_profile(find_folder(profile))
        return f"{head.model} on {head.board}"
    return profile.name


def _is_profile(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (HEAD, TRACE))


def _find_case_profiles(folder: Path, inner: str) -> dict[str, Path]:
    """Return case -> profile directory, for the immediate subdirectories."""
    return {path.name: path / inner for path in sorted(folder.iterdir()) if _is_profile(path / inner)}


def _select_profile(where: str, found: Mapping[str, Path], case: str) -> Path:
    if case and case not in found:
        hint = did_you_mean(case, found) + (f"known cases: {', '.join(found)}" if found else _HINT)
        raise UsageError(f"{where} has no profile for case {case!r}", hint=hint)
    if not found:
        raise UsageError(f"{where} has no profile", hint=_HINT)
    if not case and len(found) > 1:
        raise UsageError(
            f"{where} has profiles for several cases: {', '.join(found)}", hint="select a case with --case NAME"
        )
    return found[case] if case else next(iter(found.values()))
