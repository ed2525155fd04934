"""Find, compare and describe stored traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import asdict

from hil.controller.pipeline.records.record import record_verdict
from hil.controller.records.base import read_record
from hil.controller.records.trace import (
    ComparedCall,
    ComparedTrace,
    ShownCall,
    ShownProgram,
    StoredTraceComparison,
    TraceDocument,
)
from hil.controller.storage.paths import is_file, is_folder
from hil.controller.storage.runs import RunStore, write_json
from hil.controller.workloads.traces.comparing import CallComparison, Judging, compare_traces, judge_trace
from hil.controller.workloads.traces.trace import COMPARISON, FILE, ModuleCall, Trace, list_arrays, read_creation_time
from hil.core.results import Outcome, exit_code_of
from hil.core.tensors import Array, get_dtype_name, type_text
from hil.errors import UsageError

# The new trace's directory in a run of `hil trace run`.
OF_RUN = "trace"
_SCHEMA = 1


def find_traces(place: Path, out: Path | None = None) -> dict[str, Path]:
    """Return the traces in a directory, by relative path. The path of a trace's directory itself is ".".

    Args:
        place: a directory, or the ID of a stored ``hil trace run``.
        out: the directory of the stored runs; None is the default.

    Raises:
        UsageError: the directory contains no traces.
    """
    if not is_folder(place) and len(place.parts) == 1:
        place = RunStore(out).open(str(place)).folder / OF_RUN
    if is_file(place / OF_RUN / FILE):
        place = place / OF_RUN
    found = {str(file.parent.relative_to(place)): file.parent for file in sorted(place.rglob(FILE))}
    if not found:
        raise UsageError(
            f"no trace found in {place}", hint="use a trace's directory, or a parent such as .../iree_llvmcpu"
        )
    return found


def find_one(place: Path, out: Path | None = None) -> Path:
    """Return the directory of the only trace in a directory.

    Raises UsageError if the directory contains no trace or multiple traces.
    """
    found = find_traces(place, out)
    if len(found) > 1:
        raise UsageError(
            f"expected one trace in {place}, found {len(found)}", hint=f"select one: {', '.join(list(found)[:5])}"
        )
    (folder,) = found.values()
    return folder


def load_one(place: Path, out: Path | None = None) -> tuple[Trace, Path]:
    """Load the only trace in a directory. Return it with the directory.

    Raises:
        UsageError: see :func:`find_one`; or the trace is damaged.
    """
    folder = find_one(place, out)
    return Trace.load(folder), folder


@dataclass(frozen=True)
class TraceComparison:
    """Comparison of a trace with the reference's trace."""

    name: str
    outcome: Outcome
    reason: str  # "" for PASS
    calls: tuple[CallComparison, ...] = ()

    def to_record(self) -> ComparedTrace:
        """Return the comparison as `hil trace compare --json` prints it."""
        calls = [
            ComparedCall(
                call=one.number,
                method=one.method,
                outcome=one.outcome,
                reason=one.reason,
                verdict=None if one.verdict is None else record_verdict(one.verdict),
            )
            for one in self.calls
        ]
        return ComparedTrace(name=self.name, outcome=self.outcome, reason=self.reason, calls=calls)

    def save(self, trace_dir: Path) -> None:
        """Write the comparison to the trace's directory, with the trace's creation time.

        Raises:
            StorageError: the file cannot be written.
            UsageError: the directory contains no trace.
        """
        stored = StoredTraceComparison(
            schema=1, trace_created=read_creation_time(trace_dir), **asdict(self.to_record())
        )
        write_json(trace_dir / COMPARISON, stored.to_json(), option="")

    def lines(self) -> list[str]:
        """Return text lines: the outcome, then all calls. For passing calls, only the first line is shown."""
        head = f"{self.outcome.value}  {self.name}"
        agree = "1 call agrees" if len(self.calls) == 1 else f"{len(self.calls)} calls agree"
        lines = [f"{head}  {self.reason or agree}"]
        return [*lines, *(f"  {line}" for call in self.calls for line in call.lines(failed_only=True))]


def read_comparison(trace_dir: Path) -> StoredTraceComparison | None:
    """Read a trace's stored comparison. Returns None if it is missing, or if the trace is newer.

    Raises UsageError if a file is damaged.
    """
    if not is_file(trace_dir / COMPARISON):
        return None
    stored = read_record(trace_dir / COMPARISON, StoredTraceComparison)
    return stored if stored.trace_created == read_creation_time(trace_dir) else None


def compare_stored(
    first: Path, second: Path, judging: Judging | None = None, out: Path | None = None
) -> list[TraceComparison]:
    """Compare the traces of two directories. The second directory contains the reference's traces.

    If both directories contain a single trace, the names of the traces may differ. Otherwise, the function compares
    traces with the same relative path. A trace in only one directory is a FAIL.

    Raises:
        UsageError: a directory has no trace, a trace is damaged, or a tolerance cannot fail.
    """
    made, wanted = find_traces(first, out), find_traces(second, out)
    if len(made) == len(wanted) == 1:
        wanted = dict(zip(made, wanted.values(), strict=True))
    found = []
    for name in dict.fromkeys((*wanted, *made)):
        if name not in made or name not in wanted:
            having = first if name in made else second
            found.append(TraceComparison(name, Outcome.FAIL, f"trace found only in {having}"))
            continue
        one, other = Trace.load(made[name]), Trace.load(wanted[name])
        calls = tuple(compare_traces(other, one, judging))
        outcome, reason = judge_trace(calls)
        if one.error and outcome is not Outcome.PASS:
            reason = f"{reason}; {one.backend} ended early: {one.error.splitlines()[0]}"
        title = make_title(one, other)
        found.append(TraceComparison(title, outcome, reason, calls))
    return found


def make_title(trace: Trace, reference: Trace) -> str:
    """Return the title of a trace's comparison."""
    return f"{trace.module_name}/{trace.name} on {trace.backend} against {reference.backend}"


def exit_code(comparisons: list[TraceComparison]) -> int:
    """Return the exit code for these comparisons."""
    return exit_code_of(one.outcome for one in comparisons)


def describe_trace(trace: Trace, folder: Path) -> TraceDocument:
    """Describe a trace without its values, for ``hil trace show --json``."""
    return TraceDocument(
        folder=str(folder),
        module=trace.module_name,
        backend=trace.backend,
        name=trace.name,
        ran_by=trace.ran_by,
        reference=str(trace.reference) if trace.reference else "",
        error=trace.error,
        calls=[_describe_call(call) for call in trace.calls],
    )


def _describe_call(call: ModuleCall) -> ShownCall:
    program = None
    if (one := call.program) is not None:
        program = ShownProgram(
            model=str(one.model), function=one.function, runtime=one.runtime, captured=list(one.captured)
        )
    return ShownCall(
        method=call.method,
        rtol=call.rtol,
        atol=call.atol,
        inputs=_list_types(list_arrays(call.inputs)),
        outputs=_list_types(list_arrays(call.outputs)),
        assigned=_list_types({name: call.state[name] for name in call.assigned}),
        program=program,
    )


def _list_types(arrays: Mapping[str, Array]) -> dict[str, str]:
    return {name: type_text(get_dtype_name(array.dtype), array.shape) for name, array in arrays.items()}
