"""Read ETDump, ExecuTorch's runtime profile: kernels and delegate steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from hil.core.clock import ClockFit, convert_by_pairs
from hil.core.timeline import InvokeTiming, OpRow, Profile, Span
from hil.errors import ImportFailed, UsageError
from hil.formats.etdump import EXECUTE, EtEvent, read_etdump
from hil.formats.executorch_file import Damaged, read_buffer

# Time unit in a file -> nanoseconds.
UNITS: Mapping[str, int] = MappingProxyType({"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000})


def read_events(path: Path) -> list[EtEvent]:
    """Read a file's timed events.

    Raises:
        ImportFailed: the file is not an ETDump, or is damaged.
    """
    try:
        return read_etdump(read_buffer(path))
    except Damaged as error:
        raise ImportFailed(f"{path.name} cannot be read: {error}") from error


def iter_etdump_rows(
    events: Sequence[EtEvent],
    *,
    run: str,
    board: str,
    clock: Sequence[tuple[int, int]] = (),
    warmup: int = 0,
    unit: int = 1,
) -> Iterator[OpRow]:
    """Yield an ETDump's rows by start, without warm-up runs and events outside runs.

    Args:
        clock: pairs of (file's time, board's time), ns.
        unit: the file's time unit, in ns.
    """
    for event in events:
        if event.run < warmup or event.name == EXECUTE:
            continue
        start, end = (convert_by_pairs(time * unit, clock) for time in (event.start, event.end))
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
    """Convert an ETDump file from outside hil to a profile.

    Raises:
        UsageError: the file is not an ETDump, is damaged, or cannot be read.
    """
    try:
        events = read_events(path)
    except ImportFailed as error:
        raise UsageError(error.message, hint="expected an ETDump file from ExecuTorch's event tracer") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    scale = UNITS[unit]
    rows = list(iter_etdump_rows(events, run=path.stem, board=board, unit=scale))
    if not rows:
        raise UsageError(f"{path} has no events", hint="profile a run of the method with ExecuTorch's event tracer")
    runs = [(event.start * scale, event.end * scale) for event in events if event.name == EXECUTE]
    first, last = min(row.start_ns for row in rows), max(row.start_ns + row.duration_ns for row in rows)
    whole = Span("run", first, last)
    notes = () if runs else ("the file does not mark method runs: each block counts as a run",)
    return Profile(
        run=path.stem,
        model=model or path.stem,
        board=board,
        runtime="executorch",
        rows=rows,
        stages=[],
        transfers=[],
        calls=[InvokeTiming("profiled", whole, whole, iterations_ns=runs)],
        counters=[],
        clock=ClockFit(0, 0.0, 0, 0),
        notes=notes,
    )
