"""Read ETDump, the flatbuffer profile from ExecuTorch runtimes built with the event tracer."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hil.formats.executorch_file import Damaged, Table, convert_parse_errors, get_root_table

IDENTIFIER = b"ED00"
FILE = "executorch.etdp"
# The runtime's event name for a method run.
EXECUTE = "Method::execute"
_STEPS = (EXECUTE, "Method::init", "Program::load_method")
_CALLS = ("OPERATOR_CALL", "DELEGATE_CALL")
_KERNEL = "native_call_"


@dataclass(frozen=True)
class EtEvent:
    """Timed event on the runtime's clock, in nanoseconds unless the build uses another unit."""

    name: str  # operator (``add.out``), a delegate's name for a step, or a runtime step
    start: int
    end: int
    # Number of the event's run, from 0; -1 for events outside runs, such as loading.
    run: int
    is_operation: bool  # True for a program operation; False for a runtime step, which may contain operations
    delegate: bool  # True if reported by a delegate


def read_etdump(data: memoryview) -> list[EtEvent]:
    """Return the timed events of an ETDump, sorted by start. A leading size field is optional.

    Raises:
        Damaged: the data is not an ETDump, is truncated or altered, or has no timed events.
    """
    if bytes(data[8:12]) == IDENTIFIER:
        with convert_parse_errors():
            if int.from_bytes(data[:4], "little") > data.nbytes - 4:
                raise Damaged("truncated file")
        data = data[4:]
    if bytes(data[4:8]) != IDENTIFIER:
        raise Damaged(f"not an ETDump of version {IDENTIFIER.decode()!r}")
    with convert_parse_errors():
        blocks = [_block(block) for block in get_root_table(data).iter_tables(1)]
    has_runs = any(one.name == EXECUTE for block in blocks for one in block)
    events: list[EtEvent] = []
    before = 0
    for block in blocks:
        own = list(_iter_run_events(block, before, has_runs))
        before = max([before, *(event.run + 1 for event in own)])
        events += own
    if not events:
        raise Damaged("missing timed events: the runtime was built without an event tracer, or ran no operators")
    return sorted(events, key=lambda event: (event.start, -event.end))


@dataclass(frozen=True)
class _Timed:
    name: str
    start: int
    end: int
    place: tuple[int, int]  # chain, instruction
    delegate: bool


def _block(block: Table) -> list[_Timed]:
    found = []
    for one in block.iter_tables(3):
        if (event := one.read_table(0)) is None:  # an allocation or a stored tensor
            continue
        delegated, text = event.number(3, "Int32", -1), event.text(4)
        name = event.text(0) or text or (f"delegate {delegated}" if delegated >= 0 else "")
        start, end = event.number(6, "Uint64"), event.number(7, "Uint64")
        if end < start or end >= 1 << 63:
            raise Damaged(f"event {name!r}: missing end, or end before start")
        place = event.number(1, "Int32"), event.number(2, "Int32", -1)
        found.append(_Timed(name, start, end, place, delegated >= 0 or bool(text)))
    return found


def _iter_run_events(block: Sequence[_Timed], before: int, has_runs: bool) -> Iterator[EtEvent]:
    """Yield a block's events with their run numbers. Earlier blocks contain ``before`` runs.

    If the file has no run events, each block counts as a run.
    """
    runs = sorted((one.start, one.end) for one in block if one.name == EXECUTE)
    starts = [start for start, _ in runs]
    # A call event contains the events that kernels and delegates report for the same instruction.
    told = Counter(one.place for one in block if one.name not in (*_CALLS, *_STEPS))
    for one in block:
        begun = bisect_right(starts, one.start)
        # Runs are sequential, so only the run that started last can contain the event.
        run = -1 if has_runs else before
        if begun and one.start <= runs[begun - 1][1]:
            run = before + begun - 1
        is_step = one.name in _STEPS or min(one.place) < 0
        holds = one.name in _CALLS and told[one.place] > 0
        name = one.name.removeprefix(_KERNEL)
        if one.name in _CALLS and not holds:
            name = f"{one.name} {one.place[1]}"
        yield EtEvent(name, one.start, one.end, run, not holds and (one.delegate or not is_step), one.delegate)
