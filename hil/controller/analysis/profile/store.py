"""Write profiles to folders and read them back, and find the folder of a profile."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from hil.controller.analysis.profile.rows import read_csv, write_csv, write_parquet
from hil.controller.analysis.profile.trace import write_trace
from hil.controller.storage.runs import RunStore, storing, write_json
from hil.core.clock import ClockFit
from hil.core.timeline import Call, OpRow, Profile, Sample, Span
from hil.errors import UsageError, did_you_mean

SCHEMA = 1
HEAD = "profile.json"
TABLE = "ops.csv"
PARQUET = "ops.parquet"
TRACE = "trace.pftrace.gz"

Made = TypeVar("Made")

_PLAIN_TYPES: dict[str, Any] = {"int": int, "float": (int, float), "str": str}

_HINT = "name a profile's folder, a trace file, or a stored run; hil run --profile DIR makes a profile"


class StoredRows(Sequence[OpRow]):
    """The rows of a folder's ``ops.csv``, read from the file at each pass: a million rows need no memory.

    Raises:
        UsageError: on reading: the table is missing, was cut off, or belongs to another profile.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[OpRow]:
        found = 0
        for row in read_csv(self.path):
            found += 1
            yield row
        if found != self._count:
            message = f"{self.path} holds {found} rows, but {HEAD} beside it names {self._count}"
            raise UsageError(message, hint="one of the files was changed or cut off: profile again")

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
    """Write a profile to a folder, which is created if needed; replace the files of an older profile.

    The table and ``profile.json`` are written first and can be read even if the trace fails.
    """
    with storing(folder, "--profile"):
        folder.mkdir(parents=True, exist_ok=True)
        # They must not remain beside the table of another profile.
        for name in (HEAD, TRACE, PARQUET):
            (folder / name).unlink(missing_ok=True)
        count = write_csv(profile.rows, folder / TABLE)
        head = dataclasses.asdict(dataclasses.replace(profile, rows=()))
        write_json(folder / HEAD, {**head, "schema": SCHEMA, "rows": count}, option="--profile")
        write_trace([profile], folder / TRACE)
        if importlib.util.find_spec("pyarrow") is not None:
            write_parquet(profile.rows, folder / PARQUET)


def read_profile(folder: Path) -> Profile:
    """Read the profile in a folder; its rows are read from the table when needed.

    Raises:
        UsageError: the folder does not exist, holds no complete profile, or was written by a newer hil.
    """
    path = folder / HEAD
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] > SCHEMA:
            raise UsageError(
                f"{folder} was written by a newer hil (schema {document['schema']})", hint="read it with that hil"
            )
        return _made(
            Profile,
            **{name: document[name] for name in ("run", "model", "board", "runtime")},
            rows=StoredRows(folder / TABLE, int(document["rows"])),
            **{name: [_made(Span, **span) for span in document[name]] for name in ("stages", "transfers")},
            calls=[_call(call) for call in document["calls"]],
            # Values that JSON cannot express, such as NaN, are stored as strings.
            counters=[_made(Sample, **{**sample, "value": float(sample["value"])}) for sample in document["counters"]],
            clock=_made(ClockFit, **document["clock"]),
            notes=tuple(document["notes"]),
        )
    except FileNotFoundError as error:
        what = f"there is no profile in {folder}" if folder.is_dir() else f"no such folder: {folder}"
        raise UsageError(what, hint="hil run MODEL --profile DIR writes one") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is damaged, or no profile: {reason}", hint="profile again") from error


def _made(of: type[Made], /, **values: Any) -> Made:
    """Make a dataclass's instance, and check the types of its plain fields."""
    made = of(**values)
    # The bound "a dataclass" cannot be expressed.
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        if not isinstance(getattr(made, field.name), _PLAIN_TYPES.get(str(field.type), object)):
            raise TypeError(f"{field.name} is no {field.type}")
    return made


def _call(call: Mapping[str, Any]) -> Call:
    sides = {side: _made(Span, **call[side]) for side in ("host", "board")}
    return _made(Call, **{**call, **sides, "iterations_ns": [(start, end) for start, end in call["iterations_ns"]]})


def find_profile(text: str, case: str = "", *, store: RunStore | None = None) -> Path:
    """Find the profile's folder, or the trace file, that the user names.

    Args:
        text: a folder of one or several profiles, a trace file, a stored run's id or its beginning, or ``latest``.
        case: the case's name, if there are several.

    Raises:
        UsageError: there is no profile, or there are several and ``case`` names none of them.
    """
    path = Path(text)
    if path.is_file():
        if case:
            raise UsageError(f"{path} is one trace: --case {case!r} has nothing to choose from")
        return path
    store = store or RunStore()
    if path.is_dir() and not (path / "run.json").is_file():
        # A folder that held a single profile may by now hold those of several cases too.
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
    """Return the trace file of a profile that :func:`find_profile` found. Raises UsageError: there is none."""
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
    """Return the folder with the rows of what :func:`find_profile` found. Raises UsageError: it is a trace alone."""
    folder = profile.parent if profile.is_file() else profile
    if not (folder / HEAD).is_file():
        what = f"{profile} is only a trace" if profile.is_file() else f"{folder} has only a trace"
        hint = f"its folder is needed, with {TABLE} and {HEAD}; hil profile open and query read traces"
        raise UsageError(f"{what}: there is no {HEAD} beside it", hint=hint)
    return folder


def title_of(profile: Path) -> str:
    """Return a title for a profile that :func:`find_profile` found: the model and the board, or the file's name."""
    # The trace can be shown even if the record is damaged.
    with contextlib.suppress(UsageError):
        head = read_profile(folder_of(profile))
        return f"{head.model} on {head.board}"
    return profile.name


def _is_profile(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (HEAD, TRACE))


def _below(folder: Path, inner: str) -> dict[str, Path]:
    """Return case -> its profile, of the immediate subfolders."""
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
