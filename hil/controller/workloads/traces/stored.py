"""Traces in folders: found, compared call by call, described."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.pipeline.record import verdict_record
from hil.controller.storage.runs import RunStore, write_file
from hil.controller.workloads.traces.comparing import CallComparison, Judging, compare_traces, judged
from hil.controller.workloads.traces.trace import FILE, Trace, arrays_in, stored_at
from hil.core.results import Outcome, exit_code_of
from hil.core.tensors import Array, dtype_name, type_text
from hil.core.text import jsonable
from hil.errors import UsageError

# Where a run of `hil trace run` keeps what it traced.
OF_RUN = "trace"


def find_traces(place: Path, out: Path | None = None) -> dict[str, Path]:
    """The traces in a place, each by where it lies in it: a trace's own folder ("."), or any folder of traces.

    Args:
        place: a folder, or the ID of a stored run of ``hil trace run``.
        out: where runs are stored; None is the default.

    Raises:
        UsageError: there is none.
    """
    if not place.is_dir() and len(place.parts) == 1:
        place = RunStore(out).open(str(place)).folder / OF_RUN
    if (place / OF_RUN / FILE).is_file():
        place = place / OF_RUN
    found = {str(file.parent.relative_to(place)): file.parent for file in sorted(place.rglob(FILE))}
    if not found:
        raise UsageError(
            f"{place} holds no trace", hint="name a trace's folder, or one that has some: .../iree_llvmcpu"
        )
    return found


def find_one(place: Path, out: Path | None = None) -> Path:
    """The folder of the one trace in a place. Raises UsageError: there is none, or there are several."""
    found = find_traces(place, out)
    if len(found) > 1:
        raise UsageError(f"{place} holds {len(found)} traces", hint=f"name one: {', '.join(list(found)[:5])}")
    (folder,) = found.values()
    return folder


def load_one(place: Path, out: Path | None = None) -> tuple[Trace, Path]:
    """The one trace in a place, and its folder. Raises UsageError: as :func:`find_one`, or it is damaged."""
    folder = find_one(place, out)
    return Trace.load(folder), folder


# What a module's test found of a trace, beside it; and when that trace was stored: it tells of no other one.
COMPARISON = "comparison.json"
OF_TRACE = "trace_created"
_SCHEMA = 1


@dataclass(frozen=True)
class TraceComparison:
    """A trace beside the reference's."""

    name: str
    outcome: Outcome
    reason: str  # "" of a pass
    calls: tuple[CallComparison, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As ``hil trace compare --json`` has it."""
        calls = [
            {
                "call": one.number,
                "method": one.method,
                "outcome": one.outcome.value,
                "reason": one.reason,
                "verdict": None if one.verdict is None else verdict_record(one.verdict),
            }
            for one in self.calls
        ]
        found = {"name": self.name, "outcome": self.outcome.value, "reason": self.reason, "calls": calls}
        return dict(jsonable(found))

    def save(self, trace_dir: Path) -> None:
        """Keep it beside the stored trace, as :meth:`to_json` has it, with the time at which that was stored.

        Raises:
            StorageError: it cannot be written.
            UsageError: there is no trace.
        """
        document = {"schema": _SCHEMA, OF_TRACE: stored_at(trace_dir), **self.to_json()}
        write_file(trace_dir / COMPARISON, json.dumps(document, indent=1) + "\n", option="")

    def lines(self) -> list[str]:
        """For people: the outcome, then every call, of one that agrees a line."""
        head = f"{self.outcome.value}  {self.name}"
        agree = "1 call agrees" if len(self.calls) == 1 else f"{len(self.calls)} calls agree"
        lines = [f"{head}  {self.reason or agree}"]
        return [*lines, *(f"  {line}" for call in self.calls for line in call.lines(failed_only=True))]


def compare_stored(
    first: Path, second: Path, judging: Judging | None = None, out: Path | None = None
) -> list[TraceComparison]:
    """Compare the traces of two places, the second's being the reference's.

    One is compared with one, whatever they are called; of several those that lie alike in both places. What only one
    place has is a FAIL.

    Raises:
        UsageError: a place has no trace, or a trace is damaged, or a tolerance cannot fail.
    """
    made, wanted = find_traces(first, out), find_traces(second, out)
    if len(made) == len(wanted) == 1:
        wanted = dict(zip(made, wanted.values(), strict=True))
    found = []
    for name in dict.fromkeys((*wanted, *made)):
        if name not in made or name not in wanted:
            having = first if name in made else second
            found.append(TraceComparison(name, Outcome.FAIL, f"only {having} has this trace"))
            continue
        one, other = Trace.load(made[name]), Trace.load(wanted[name])
        calls = tuple(compare_traces(other, one, judging))
        outcome, reason = judged(calls)
        if one.error and outcome is not Outcome.PASS:
            reason = f"{reason}; {one.backend} ended early: {one.error.splitlines()[0]}"
        title = title_of(one, other)
        found.append(TraceComparison(title, outcome, reason, calls))
    return found


def title_of(trace: Trace, reference: Trace) -> str:
    """What the comparison of a trace is called."""
    return f"{trace.module_name}/{trace.name} on {trace.backend} beside {reference.backend}"


def exit_code(comparisons: list[TraceComparison]) -> int:
    """The exit code of a comparison."""
    return exit_code_of(one.outcome for one in comparisons)


def describe(trace: Trace, folder: Path) -> dict[str, Any]:
    """A trace as ``hil trace show --json`` has it: tensors are told by type."""
    return {
        "folder": str(folder),
        "module": trace.module_name,
        "backend": trace.backend,
        "name": trace.name,
        "ran_by": trace.ran_by,
        "reference": str(trace.reference) if trace.reference else "",
        "error": trace.error,
        "calls": [
            {
                "method": call.method,
                "rtol": call.rtol,
                "atol": call.atol,
                "inputs": _types(arrays_in(call.inputs)),
                "outputs": _types(arrays_in(call.outputs)),
                "assigned": _types({name: call.state[name] for name in call.assigned}),
                "program": call.program
                and {
                    "model": str(call.program.model),
                    "function": call.program.function,
                    "runtime": call.program.runtime,
                    "captured": list(call.program.captured),
                },
            }
            for call in trace.calls
        ],
    }


def _types(arrays: Mapping[str, Array]) -> dict[str, str]:
    return {name: type_text(dtype_name(array.dtype), array.shape) for name, array in arrays.items()}
