"""A profile's folder: ``profile.json``, ``ops.csv``, ``ops.parquet``, ``trace.pftrace.gz``; written and read back."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from hil.controller.analysis.profile.rows import read_csv, replacing, write_csv, write_parquet
from hil.controller.analysis.profile.trace import write_trace
from hil.controller.storage.runs import storing
from hil.core.clock import ClockFit
from hil.core.text import jsonable
from hil.core.timeline import Call, OpRow, Profile, Sample, Span
from hil.errors import UsageError

SCHEMA = 1
_PLAIN_TYPES: dict[str, Any] = {"int": int, "float": (int, float), "str": str}
Made = TypeVar("Made")
HEAD = "profile.json"
TABLE = "ops.csv"
PARQUET = "ops.parquet"
TRACE = "trace.pftrace.gz"


class StoredRows(Sequence[OpRow]):
    """The rows of a folder's ``ops.csv``, read anew each time: a million of them need no memory.

    Raises:
        UsageError: while they are read: the table is missing, was cut off, or is not that of the profile.
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
            message = f"{self.path} holds {found} rows, and {HEAD} beside it tells of {self._count}"
            raise UsageError(message, hint="one of the two was changed or cut off: profile again")

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
    """Write a profile into a folder, which is made if needed; what an older profile left there is replaced.

    The table and ``profile.json`` come first: whatever fails after them, they can be read back.

    Raises:
        HilError: the trace could not be made of it.
        StorageError: the folder cannot be written.
    """
    with storing(folder, "--profile"):
        folder.mkdir(parents=True, exist_ok=True)
        # Not to stand beside the table of another profile.
        for name in (HEAD, TRACE, PARQUET):
            (folder / name).unlink(missing_ok=True)
        count = write_csv(profile.rows, folder / TABLE)
        head = {
            field.name: getattr(profile, field.name) for field in dataclasses.fields(profile) if field.name != "rows"
        }
        document = {"schema": SCHEMA, "rows": count, **{name: _plain(value) for name, value in head.items()}}
        with replacing(folder / HEAD) as temporary:
            temporary.write_text(json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        write_trace([profile], folder / TRACE)
        if importlib.util.find_spec("pyarrow") is not None:
            write_parquet(profile.rows, folder / PARQUET)


def read_profile(folder: Path) -> Profile:
    """The profile in a folder; its rows are read from the table when they are asked for.

    Raises:
        UsageError: there is no such folder, no profile in it or no whole one, or a newer hil wrote it.
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
            run=document["run"],
            model=document["model"],
            board=document["board"],
            runtime=document["runtime"],
            rows=StoredRows(folder / TABLE, int(document["rows"])),
            stages=[_made(Span, **span) for span in document["stages"]],
            transfers=[_made(Span, **span) for span in document["transfers"]],
            calls=[_call(call) for call in document["calls"]],
            # A value that JSON has no word for stands there as a text.
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
        told = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is not whole, or no profile: {told}", hint="profile again") from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _made(of: type[Made], /, **values: Any) -> Made:
    """A dataclass's instance whose numbers are numbers and whose texts are texts."""
    made = of(**values)
    # A dataclass's instance, which no bound of a type variable can say.
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        if not isinstance(getattr(made, field.name), _PLAIN_TYPES.get(str(field.type), object)):
            raise TypeError(f"{field.name} is no {field.type}")
    return made


def _call(call: Mapping[str, Any]) -> Call:
    return _made(
        Call,
        kind=call["kind"],
        host=_made(Span, **call["host"]),
        board=_made(Span, **call["board"]),
        warmup_ns=call["warmup_ns"],
        iterations_ns=[(start, end) for start, end in call["iterations_ns"]],
    )
