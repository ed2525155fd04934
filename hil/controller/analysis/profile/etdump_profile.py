"""Read ETDump, the profile of ExecuTorch's runtime: which kernels and which steps of delegates ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from hil.core.clock import ClockFit, by_pairs
from hil.core.timeline import Call, OpRow, Profile, Span
from hil.errors import ImportFailed, UsageError
from hil.formats.etdump import EXECUTE, EtEvent, read_etdump
from hil.formats.executorch_file import Damaged, mapped

# Unit of the times in a file -> nanoseconds.
UNITS: Mapping[str, int] = MappingProxyType({"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000})


def read_events(path: Path) -> list[EtEvent]:
    """The timed events of a file. Raises ImportFailed: it is no ETDump, or a damaged one."""
    try:
        return read_etdump(mapped(path))
    except Damaged as error:
        raise ImportFailed(f"{path.name} cannot be read: {error}") from error


def etdump_rows(
    events: Sequence[EtEvent],
    *,
    run: str,
    board: str,
    clock: Sequence[tuple[int, int]] = (),
    warmup: int = 0,
    unit: int = 1,
) -> Iterator[OpRow]:
    """Yield the rows of an ETDump by start, without warm-up and what belongs to no run.

    Args:
        clock: pairs of (file's time, board's time), ns.
        unit: nanoseconds that 1 is in the file.
    """
    for event in events:
        if event.run < warmup or event.name == EXECUTE:
            continue
        start, end = (by_pairs(time * unit, clock) for time in (event.start, event.end))
        yield OpRow(
            run=run,
            iteration=event.run - warmup,
            board=board,
            runtime="executorch",
            op=event.name,
            kind="compute" if event.is_operation else "runtime",
            onnx_nodes=(),
            op_types=(event.name.partition(" #")[0],) if event.is_operation else (),
            start_ns=start,
            duration_ns=end - start,
        )


def profile_of(path: Path, *, model: str, board: str, unit: str = "ns") -> Profile:
    """The profile that a file of somebody else's run is.

    Raises:
        UsageError: it is no ETDump, or a damaged one, or cannot be read.
    """
    try:
        events = read_events(path)
    except ImportFailed as error:
        raise UsageError(error.message, hint="an ETDump is what ExecuTorch's event tracer writes") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    scale = UNITS[unit]
    rows = list(etdump_rows(events, run=path.stem, board=board, unit=scale))
    runs = [(event.start * scale, event.end * scale) for event in events if event.name == EXECUTE]
    first, last = min(row.start_ns for row in rows), max(row.start_ns + row.duration_ns for row in rows)
    whole = Span("run", first, last)
    notes = () if runs else ("the file tells no runs of the method: each of its blocks counts as one",)
    return Profile(
        run=path.stem,
        model=model or path.stem,
        board=board,
        runtime="executorch",
        rows=rows,
        stages=[],
        transfers=[],
        calls=[Call("profiled", whole, whole, iterations_ns=runs)],
        counters=[],
        clock=ClockFit(0, 0.0, 0, 0),
        notes=notes,
    )
