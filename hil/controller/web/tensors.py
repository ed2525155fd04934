"""The tensors of a case as a page offers them: an output with what it is beside, an input alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hil.controller.web.records import PLAIN_REFERENCES, CaseDetail, TensorFile
from hil.controller.web.sessions import Session
from hil.core.file_tensor import FileTensor
from hil.core.npy import is_raw, open_npy
from hil.core.tensors import DTYPES, ML_DTYPES, dtype_name, dtype_of
from hil.errors import UsageError

# The folders of references, as runs and as suites name them.
_REFERENCES = "references"
# A text is read into memory as a whole.
_TEXT_BYTES = 4 << 20


@dataclass(frozen=True)
class Side:
    """One of two tensors, or the only one: a file, and what it is called."""

    title: str
    path: Path
    dtype: str = ""  # "" is the file's own


@dataclass(frozen=True)
class Subject:
    """What a page shows: a tensor, and the one that it is beside, if there is one."""

    kind: str  # outputs, inputs, references, files
    name: str
    sides: Sequence[Side]
    against: str = ""  # who the reference is
    recorded: Mapping[str, Any] = field(default_factory=dict)  # the comparison that the record has of it
    beside: str = ""  # the folder of the reference, where that is not the one that decides


def subjects_of(detail: CaseDetail) -> list[Subject]:
    """What there is of a case: its outputs beside the reference that decides, its inputs, what references have alone,
    and its outputs beside the other references."""
    of_kind: dict[str, list[TensorFile]] = {"outputs": [], "inputs": [], _REFERENCES: []}
    for one in detail.tensors:
        of_kind.setdefault(one.kind, []).append(one)
    outputs, references = of_kind.pop("outputs"), of_kind.pop(_REFERENCES)
    paired = _paired(outputs, references)
    found = [
        _subject(one, other, detail.outputs, number, detail.against, len(outputs))
        for number, (one, other) in enumerate(zip(outputs, paired, strict=True))
    ]
    found += [Subject("inputs", one.name, [Side("Input", one.path, one.dtype)]) for one in of_kind.pop("inputs")]
    alone = [one for one in references if one not in paired]
    found += [Subject(_REFERENCES, one.name, [Side("Reference", one.path, one.dtype)]) for one in alone]
    for kind, others in of_kind.items():
        comparisons, against = _other(detail, kind)
        for number, (one, other) in enumerate(zip(outputs, _paired(outputs, others), strict=True)):
            if other is not None:
                subject = _subject(one, other, comparisons, number, against, len(outputs))
                found.append(replace(subject, beside=kind))
    return found


def _subject(
    one: TensorFile,
    other: TensorFile | None,
    comparisons: Sequence[Mapping[str, Any]],
    number: int,
    against: str,
    count: int,
) -> Subject:
    """An output and its reference; its comparison has its name, or its place where there is one of each."""
    named = (found for found in comparisons if found.get("name") == one.name)
    recorded = next(named, comparisons[number] if len(comparisons) == count else {})
    sides = [Side("Board", one.path, one.dtype or str(recorded.get("dtype") or ""))]
    if other is not None:
        sides.append(Side("Reference", other.path, str(recorded.get("reference_dtype") or other.dtype)))
    return Subject("outputs", str(recorded.get("name") or one.name), sides, against, recorded)


def _other(detail: CaseDetail, kind: str) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The comparisons with a reference that does not decide, and who it is."""
    number = kind.removeprefix(f"{_REFERENCES}-")
    if kind == PLAIN_REFERENCES:
        beside = detail.others[-1:]
    else:
        beside = detail.others[int(number) - 1 : int(number)] if number.isdecimal() else []
    return (beside[0].outputs, beside[0].against) if beside else ((), kind)


def _paired(outputs: Sequence[TensorFile], references: Sequence[TensorFile]) -> list[TensorFile | None]:
    """The reference of each output: by name where both have the same names, else by place, as hil compares them."""
    if len(outputs) != len(references):
        return [next((one for one in references if one.name == output.name), None) for output in outputs]
    names = {one.name: one for one in references}
    if names.keys() == {one.name for one in outputs}:
        return [names[one.name] for one in outputs]
    return list(references)


def find_subject(subjects: Sequence[Subject], kind: str, name: str, beside: str = "") -> Subject:
    """One by its kind, its name and its reference; the first if none is named. Raises UsageError: there is none."""
    for one in subjects:
        if (not kind or one.kind == kind) and (not name or one.name == name) and one.beside == beside:
            return one
    what = f"{kind.removesuffix('s') or 'tensor'} {name!r}" if name else "tensor"
    raise UsageError(f"no {what} is stored", hint="the case's page lists what is")


@dataclass(frozen=True)
class Kept:
    """What a case's page says of its tensors."""

    subjects: Sequence[Subject]
    why: str = ""  # why there are none
    command: str = ""  # what keeps them; "" where nothing does


def kept_of(session: Session, detail: CaseDetail) -> Kept:
    """The tensors of a case that are on disk, or why there are none and the command that keeps them."""
    if found := subjects_of(detail):
        return Kept(found)
    if session.kind == "suite":
        command = detail.repeat or session.command
        keep = f"{command} --keep-all" if command and "--keep-all" not in command else command
        return Kept((), "A suite keeps the tensors of cases that did not pass. To keep these as well:", keep)
    if session.kind == "bisect":
        return Kept((), "A bisection keeps the tensors of the layers that did not pass.")
    return Kept((), "None are stored: the case ended before there were any, or its files were deleted.")


def open_tensor(side: Side, dtype: str = "") -> FileTensor:
    """A file's tensor, of which nothing is read yet; fixed-width text stays that.

    Args:
        dtype: what raw bytes are, where neither the record nor the file says it.

    Raises:
        UsageError: it cannot be read, is of no dtype that hil knows, or its dtype has to be said.
    """
    found = open_npy(side.path)
    if found.dtype.kind == "V":
        choices = raw_dtypes(found.dtype.itemsize)
        for wanted in (side.dtype, dtype, *(choices if len(choices) == 1 else ())):
            if wanted in DTYPES and is_raw(found.dtype, wanted):
                return found.view(dtype_of(wanted))
        raise UnknownDtype(side.path, choices)
    dtype_name(found.dtype)
    if found.dtype.itemsize > _TEXT_BYTES:
        raise UsageError(f"{side.path.name} has texts of {found.dtype.itemsize} bytes: too long to be shown")
    return found


def raw_dtypes(itemsize: int) -> list[str]:
    """What raw bytes of a .npy file may be: numpy's format has no name for these."""
    return [name for name in ML_DTYPES if dtype_of(name).itemsize == itemsize]


class UnknownDtype(UsageError):
    """A file has raw bytes, and nothing says what they are."""

    def __init__(self, path: Path, choices: Sequence[str]) -> None:
        why = f"one of {', '.join(choices)}" if choices else "no dtype that hil knows has elements of that size"
        super().__init__(f"{path.name} holds raw bytes, of which .npy does not say what they are", hint=why)
        self.choices = choices


def stamp_of(path: Path) -> tuple[Any, ...]:
    """What tells whether a file is as it was. Raises UsageError: it is gone."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}") from error
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}") from error
    return (str(path), found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def recorded_tolerance(recorded: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The tolerance that a record was judged within, as far as it says one."""
    found = recorded.get("tolerance")
    given = found if isinstance(found, dict) else {}
    values = (given.get(name) for name in ("rtol", "atol"))
    rtol, atol = (float(one) if isinstance(one, (int, float)) and not isinstance(one, bool) else None for one in values)
    return rtol, atol
