"""Tensors of a case for pages: outputs paired with references, and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hil.controller.web.index.sessions import IndexedSession
from hil.controller.web.session.records import PLAIN_REFERENCES, CaseDetail, TensorFile
from hil.core.file_tensor import FileTensor
from hil.core.npy import is_raw, open_npy
from hil.core.results import Outcome
from hil.core.tensors import DTYPES, ML_DTYPES, get_dtype_name, parse_dtype
from hil.errors import UsageError

# Directory of references in runs and suites.
_REFERENCES = "references"
# Maximum bytes per string, because strings are read whole.
_TEXT_BYTES = 4 << 20


@dataclass(frozen=True)
class TensorSide:
    """Tensor file with a title."""

    title: str
    path: Path
    dtype: str = ""  # "" uses the file's dtype


@dataclass(frozen=True)
class TensorSubject:
    """Tensor to show, with its reference if available."""

    kind: str  # outputs, inputs, references, files
    name: str
    sides: Sequence[TensorSide]
    against: str = ""  # name of the reference
    recorded: Mapping[str, Any] = field(default_factory=dict)  # recorded comparison of this tensor
    beside: str = ""  # directory of the reference, if it is not the decisive one


def list_subjects(detail: CaseDetail) -> list[TensorSubject]:
    """Return the tensors of a case.

    The order is: outputs with the decisive reference, inputs, references without an output, outputs with other
    references.
    """
    of_kind: dict[str, list[TensorFile]] = {"outputs": [], "inputs": [], _REFERENCES: []}
    for one in detail.tensors:
        of_kind.setdefault(one.kind, []).append(one)
    outputs, references = of_kind.pop("outputs"), of_kind.pop(_REFERENCES)
    paired = _pair_references(outputs, references)
    found = [
        _make_output_subject(one, other, detail.outputs, number, detail.against, len(outputs))
        for number, (one, other) in enumerate(zip(outputs, paired, strict=True))
    ]
    found += [
        TensorSubject("inputs", one.name, [TensorSide("Input", one.path, one.dtype)]) for one in of_kind.pop("inputs")
    ]
    alone = [one for one in references if one not in paired]
    found += [TensorSubject(_REFERENCES, one.name, [TensorSide("Reference", one.path, one.dtype)]) for one in alone]
    for kind, others in of_kind.items():
        comparisons, against = _list_other_comparisons(detail, kind)
        for number, (one, other) in enumerate(zip(outputs, _pair_references(outputs, others), strict=True)):
            if other is not None:
                subject = _make_output_subject(one, other, comparisons, number, against, len(outputs))
                found.append(replace(subject, beside=kind))
    return found


def _make_output_subject(
    one: TensorFile,
    other: TensorFile | None,
    comparisons: Sequence[Mapping[str, Any]],
    number: int,
    against: str,
    count: int,
) -> TensorSubject:
    """Return an output with its reference and recorded comparison.

    The comparison is matched by name, or by position if each output has a comparison.
    """
    named = (found for found in comparisons if found.get("name") == one.name)
    recorded = next(named, comparisons[number] if len(comparisons) == count else {})
    sides = [TensorSide("Board", one.path, one.dtype or str(recorded.get("dtype") or ""))]
    if other is not None:
        sides.append(TensorSide("Reference", other.path, str(recorded.get("reference_dtype") or other.dtype)))
    return TensorSubject("outputs", str(recorded.get("name") or one.name), sides, against, recorded)


def _list_other_comparisons(detail: CaseDetail, kind: str) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Return the comparisons with a reference that is not decisive, and the reference's name."""
    number = kind.removeprefix(f"{_REFERENCES}-")
    if kind == PLAIN_REFERENCES:
        beside = detail.others[-1:]
    else:
        beside = detail.others[int(number) - 1 : int(number)] if number.isdecimal() else []
    return (beside[0].outputs, beside[0].against) if beside else ((), kind)


def _pair_references(outputs: Sequence[TensorFile], references: Sequence[TensorFile]) -> list[TensorFile | None]:
    """Return the reference of every output, by name if all names match, otherwise by position, as hil compares them."""
    if len(outputs) != len(references):
        return [next((one for one in references if one.name == output.name), None) for output in outputs]
    names = {one.name: one for one in references}
    if names.keys() == {one.name for one in outputs}:
        return [names[one.name] for one in outputs]
    return list(references)


def find_subject(subjects: Sequence[TensorSubject], kind: str, name: str, beside: str = "") -> TensorSubject:
    """Return a subject by kind, name and reference, by default the first.

    Raises UsageError if the subject is missing.
    """
    for one in subjects:
        if (not kind or one.kind == kind) and (not name or one.name == name) and one.beside == beside:
            return one
    what = f"{kind.removesuffix('s') or 'tensor'} {name!r}" if name else "tensor"
    raise UsageError(f"{what} not found", hint="the case page lists the stored tensors")


@dataclass(frozen=True)
class KeptTensors:
    """Tensors of a case, or the reason for missing tensors and a command that stores them."""

    subjects: Sequence[TensorSubject]
    why: str = ""  # reason for missing tensors
    command: str = ""  # command that stores them; "" if none


def find_kept_tensors(session: IndexedSession, detail: CaseDetail) -> KeptTensors:
    """Return the stored tensors of a case, or the reason why they are missing and a command that stores them."""
    if found := list_subjects(detail):
        return KeptTensors(found)
    if session.kind == "suite" and detail.record.get("outcome") == Outcome.PASS.value:
        why = "A suite only stores tensors of cases that did not pass."
        command = detail.repeat or session.command
        if not command:
            return KeptTensors((), why)
        option = "--hil-keep-all" if command.startswith("pytest ") else "--keep-all"
        keep = command if option in command else f"{command} {option}"
        return KeptTensors((), f"{why} To store all tensors:", keep)
    if session.kind == "bisect":
        return KeptTensors((), "A bisection only stores tensors of layers that did not pass.")
    return KeptTensors((), "No tensors stored: the case ended early, or the files were deleted.")


def open_tensor(side: TensorSide, dtype: str = "") -> FileTensor:
    """Open a tensor file without reading data. Fixed-width strings are not converted.

    Args:
        dtype: dtype of raw bytes, if neither the record nor the file specifies it.

    Raises:
        UsageError: the file is unreadable, or the dtype is unsupported or unknown.
    """
    found = open_npy(side.path)
    if found.dtype.kind == "V":
        choices = list_raw_dtypes(found.dtype.itemsize)
        for wanted in (side.dtype, dtype, *(choices if len(choices) == 1 else ())):
            if wanted in DTYPES and is_raw(found.dtype, wanted):
                return found.view(parse_dtype(wanted))
        raise UnknownDtype(side.path, choices)
    get_dtype_name(found.dtype)
    if found.dtype.itemsize > _TEXT_BYTES:
        raise UsageError(
            f"strings in {side.path.name} are too long for a page: {found.dtype.itemsize} bytes each, "
            f"maximum {_TEXT_BYTES}"
        )
    return found


def list_raw_dtypes(itemsize: int) -> list[str]:
    """Return the possible dtypes for raw bytes in a .npy file. The format has no names for them."""
    return [name for name in ML_DTYPES if parse_dtype(name).itemsize == itemsize]


class UnknownDtype(UsageError):
    """A file contains raw bytes of unknown dtype."""

    def __init__(self, path: Path, choices: Sequence[str]) -> None:
        why = f"possible dtypes: {', '.join(choices)}" if choices else "no supported dtype has elements of this size"
        super().__init__(f"{path.name} contains raw bytes of unknown dtype", hint=why)
        self.choices = choices


def stamp_of(path: Path) -> tuple[Any, ...]:
    """Return a stamp that changes with the file. Raises UsageError if the file is missing."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}") from error
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}") from error
    return (str(path), found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def read_recorded_tolerance(recorded: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the recorded rtol and atol, or None."""
    found = recorded.get("tolerance")
    given = found if isinstance(found, dict) else {}
    values = (given.get(name) for name in ("rtol", "atol"))
    rtol, atol = (float(one) if isinstance(one, (int, float)) and not isinstance(one, bool) else None for one in values)
    return rtol, atol
