"""Find the next failing output of a session, in the order of its cases and outputs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hil.controller.web.index.sessions import IndexedSession, find_case, iter_failing_cases
from hil.controller.web.session.records import read_detail
from hil.controller.web.tensors.tensors import TensorSubject, find_kept_tensors
from hil.core.cancellation import check_cancelled
from hil.errors import UsageError

# Maximum cases to read for a link. Other failing cases may have no stored tensors.
_MAX_READ = 200


@dataclass(frozen=True)
class FailingOutput:
    """Output of a failing case."""

    case: str
    kind: str
    output: str


@dataclass(frozen=True)
class FailingPosition:
    """Position of a case among the failing cases of its session, and of an output among its failing outputs.

    The positions start at 1. 0 means that the case or the output is not failing.
    """

    case: int
    cases: int
    output: int
    outputs: int


def find_position(
    database: sqlite3.Connection,
    session: IndexedSession,
    case: sqlite3.Row,
    subjects: Sequence[TensorSubject],
    subject: TensorSubject,
) -> FailingPosition:
    """Return the position of a tensor's case and of the tensor."""
    numbers = [number for number, _ in iter_failing_cases(database, session)]
    found = numbers.index(case["number"]) + 1 if case["number"] in numbers else 0
    outputs = [(one.kind, one.name) for one in list_failing_outputs(subjects)]
    at = outputs.index((subject.kind, subject.name)) + 1 if (subject.kind, subject.name) in outputs else 0
    return FailingPosition(found, len(numbers), at, len(outputs))


def list_failing_outputs(subjects: Sequence[TensorSubject]) -> list[TensorSubject]:
    """Return the outputs whose recorded comparison with the decisive reference failed."""
    return [one for one in subjects if one.kind == "outputs" and not one.beside and one.recorded.get("passed") is False]


def find_next_failing(
    database: sqlite3.Connection, session: IndexedSession, case: str, kind: str, output: str, *, forward: bool = True
) -> FailingOutput:
    """Return the next or previous failing output. After the last output, the first follows.

    A failing case without failing outputs, such as an unstable case, counts as one output. Cases without stored
    tensors are skipped.

    Raises:
        UsageError: no failing case has stored tensors.
    """
    row = find_case(database, session, case)
    here = [
        (one.kind, one.name)
        for one in list_failing_outputs(find_kept_tensors(session, read_detail(session, row)).subjects)
    ]
    if (kind, output) in here:
        later = here[here.index((kind, output)) + 1 :] if forward else here[: here.index((kind, output))][::-1]
        if later:
            return FailingOutput(case, *later[0])
    elif here:
        return FailingOutput(case, *here[0 if forward else -1])
    for name in _iter_other_cases(database, session, row["number"], forward=forward):
        check_cancelled()
        kept = find_kept_tensors(session, read_detail(session, find_case(database, session, name)))
        if not kept.subjects:
            continue
        outputs = list_failing_outputs(kept.subjects)
        chosen = (outputs[0] if forward else outputs[-1]) if outputs else kept.subjects[0]
        return FailingOutput(name, chosen.kind, chosen.name)
    raise UsageError(
        f"no failing case in {session.title} has stored tensors",
        hint="hil suite run with --keep-all stores the tensors of all cases",
    )


def _iter_other_cases(
    database: sqlite3.Connection, session: IndexedSession, number: int, *, forward: bool
) -> Iterator[str]:
    """Yield the failing cases after this number, then those up to this number; backwards likewise."""
    listed = list(iter_failing_cases(database, session))
    if forward:
        ordered = [one for one in listed if one[0] > number] + [one for one in listed if one[0] <= number]
    else:
        ordered = [one for one in listed if one[0] < number][::-1] + [one for one in listed if one[0] >= number][::-1]
    return (name for _, name in ordered[:_MAX_READ])
