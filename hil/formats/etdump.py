"""ETDump: the profile that a build of ExecuTorch's runtime with its event tracer writes, a flatbuffer."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hil.formats.executorch_file import Damaged, Table, reading, root_table

IDENTIFIER = b"ED00"
FILE = "executorch.etdp"
# What the runtime calls one run of a method, among other steps of its own.
EXECUTE = "Method::execute"
_STEPS = (EXECUTE, "Method::init", "Program::load_method")
_CALLS = ("OPERATOR_CALL", "DELEGATE_CALL")
_KERNEL = "native_call_"


@dataclass(frozen=True)
class EtEvent:
    """Something that took time, by the runtime's clock: in nanoseconds, unless it was built otherwise."""

    name: str  # the operator, ``add.out``; what a delegate calls a step of its own; or the runtime's own step
    start: int
    end: int
    # the run that it belongs to, from 0; -1 for what is outside of any, such as loading.
    run: int
    is_operation: bool  # an operation of the program; else a step of the runtime's, which may hold operations
    delegate: bool  # whether a delegate tells it


def read_etdump(data: memoryview) -> list[EtEvent]:
    """The timed events of an ETDump, by start; with or without a size in front, as both are written.

    Raises:
        Damaged: it is none, or cut off, or altered, or holds no timed event.
    """
    if bytes(data[8:12]) == IDENTIFIER:
        with reading():
            if int.from_bytes(data[:4], "little") > data.nbytes - 4:
                raise Damaged("it is cut off")
        data = data[4:]
    if bytes(data[4:8]) != IDENTIFIER:
        raise Damaged(f"it is no ETDump of the version {IDENTIFIER.decode()!r}")
    with reading():
        blocks = [_block(block) for block in root_table(data).tables(1)]
    has_runs = any(one.name == EXECUTE for block in blocks for one in block)
    events: list[EtEvent] = []
    before = 0
    for block in blocks:
        own = list(_in_runs(block, before, has_runs))
        before = max([before, *(event.run + 1 for event in own)])
        events += own
    if not events:
        raise Damaged("it holds no timed event: the runtime was built without its event tracer, or ran nothing")
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
    for one in block.tables(3):
        if (event := one.table(0)) is None:  # an allocation, or a tensor that was kept
            continue
        delegated, text = event.number(3, "Int32", -1), event.text(4)
        name = event.text(0) or text or (f"delegate {delegated}" if delegated >= 0 else "")
        start, end = event.number(6, "Uint64"), event.number(7, "Uint64")
        if end < start or end >= 1 << 63:
            raise Damaged(f"the event {name!r} ends before it begins, or never")
        place = event.number(1, "Int32"), event.number(2, "Int32", -1)
        found.append(_Timed(name, start, end, place, delegated >= 0 or bool(text)))
    return found


def _in_runs(block: Sequence[_Timed], before: int, has_runs: bool) -> Iterator[EtEvent]:
    """The events of a block, each with its run, of which ``before`` came before; a block is one where no file tells."""
    runs = sorted((one.start, one.end) for one in block if one.name == EXECUTE)
    starts = [start for start, _ in runs]
    # A call's own event holds those that kernels and delegates tell of the same instruction.
    told = Counter(one.place for one in block if one.name not in (*_CALLS, *_STEPS))
    for one in block:
        begun = bisect_right(starts, one.start)
        # The last one, nearly always: runs come one after the other.
        within = next((number for number in reversed(range(begun)) if one.start <= runs[number][1]), None)
        run = before + within if within is not None else -1 if has_runs else before
        is_step = one.name in _STEPS or min(one.place) < 0
        holds = one.name in _CALLS and told[one.place] > 0
        name = one.name.removeprefix(_KERNEL)
        if one.name in _CALLS and not holds:
            name = f"{one.name} {one.place[1]}"
        yield EtEvent(name, one.start, one.end, run, not holds and (one.delegate or not is_step), one.delegate)
