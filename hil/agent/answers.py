"""Parse worker responses. Treat responses as hostile: the program in the worker may send any bytes.

:func:`read` parses the bytes of one message and needs no process. For any input, :func:`read` returns a response that
satisfies the constraints of the response class, or raises a program error.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from hil.agent import ipc
from hil.agent.iterations import MAX_ANSWERS, MAX_KEPT
from hil.core.instructions import AGENT_COUNTERS, InstructionCounts
from hil.core.placement_reasons import MAX_NAMES, MAX_REASON_CHARS, MAX_REASONS, PlacementReason
from hil.core.results import Part, Placement
from hil.core.steps import MAX_CALLS, StepCall
from hil.core.tensors import DTYPES, TensorSpec, count_bytes
from hil.errors import HilError, LoadFailed, RunCrashed, RunFailed
from hil.protocol.wire_errors import WORKER_KINDS, make_error

# Numbers of a run: warm-up time, CPU time and peak memory, followed by two timestamps per iteration, and by the
# instructions of each iteration if they were counted.
_NUMBERS = 3
_ITERATION_BYTES = 24
# Numbers for a call in a program with steps: tokens, start and end.
_CALL_NUMBERS = 3
# Maximum size of a cached output description. The next response usually has the same description.
_KEPT_BYTES = 1 << 12
# Every numpy version supports this many dimensions.
_MAX_DIMS = 32
_MAX_FILE_NAME = 200
_MAX_PROBLEM = 1000
_INT64 = 1 << 63
_OVERWRITTEN = "the program or the runtime corrupted the worker's memory, or replied in place of the worker"


@dataclass(frozen=True)
class ProgramSignature:
    """Signature of the loaded program."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    function: str
    load_ns: int


@dataclass(frozen=True)
class Output:
    """Tensor in the output arena: ``size`` bytes from offset ``at``. The size matches the dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    size: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the tensor."""
        return self.at + self.size


@dataclass(frozen=True)
class RepeatedAnswer:
    """One of the distinct results of an invocation's runs."""

    runs: int
    first: int  # number of the first run with this result
    outputs: tuple[Output, ...] | None = None  # None if the worker did not store them


@dataclass(frozen=True)
class Repeated:
    """Worker's summary of the outputs of all runs of an invocation."""

    answers: tuple[RepeatedAnswer, ...]
    sampled: bool
    others: int  # number of runs with further distinct results, which are only counted
    differing: tuple[int, ...]  # indices of the outputs that differ


@dataclass(frozen=True)
class Ran:
    """Result of an invocation or a profiling pass."""

    outputs: tuple[Output, ...]  # in arena order, without overlaps
    # One start_ns and end_ns per iteration; empty for a profiling pass.
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    warmup_ns: int
    cpu_ns: int
    peak_bytes: int
    placement: Placement | None = None  # None if unchanged or unknown
    repetition: Repeated | None = None  # None after a single run
    calls: tuple[StepCall, ...] = ()  # calls of a program with steps
    instructions: InstructionCounts | None = None  # None if not requested
    device_bytes: int = 0  # peak memory of the device; 0 if unknown

    @property
    def size(self) -> int:
        """Number of arena bytes that the outputs take."""
        return max((output.end for output in self.outputs), default=0)


class ClockStepped(RunCrashed):
    """Worker timestamps that run backwards: the board's clock stepped back, or the program forged the timestamps.

    ``ns`` is a lower bound of the step's size, because the clock advances between the two readings.
    """

    def __init__(self, ns: int) -> None:
        super().__init__("invalid response from the worker: timestamps decrease", hint=_OVERWRITTEN)
        self.ns = ns


Answer: TypeAlias = "ProgramSignature | Ran | None"
# The counts in a description are empty: the numbers contain them.
# The last value is the device memory in bytes.
_Made: TypeAlias = "tuple[tuple[Output, ...], Placement | None, Repeated | None, InstructionCounts | None, int]"


@dataclass
class Known:
    """Output description of the last invocation, as bytes and in parsed form."""

    text: bytes = b""
    made: _Made = ((), None, None, None, 0)


def max_response_bytes(iterations: int) -> int:
    """Return the maximum size in bytes of a response to an order with this many iterations."""
    return ipc.MAX_BYTES + iterations * _ITERATION_BYTES + MAX_CALLS * _CALL_NUMBERS * 8


def read(
    body: bytes,
    op: str,
    iterations: int = 0,
    known: Known | None = None,
    kinds: frozenset[type[HilError]] = WORKER_KINDS,
) -> Answer:
    """Parse a worker's response to an order. Return None for a successful prepare or open.

    Args:
        op: prepare, open, load, invoke, generate or profile.
        known: cached output description of the worker's last invocation; this function reads and replaces it.
        kinds: error classes that the worker may report.

    Raises:
        LoadFailed, RunFailed, UsageError: the worker reports this error.
        RunCrashed: the response is invalid for this order.
        ClockStepped: the timestamps run backwards.
    """
    try:
        most = _NUMBERS + 3 * iterations + (MAX_CALLS * _CALL_NUMBERS if op == "generate" else 0)
        text, numbers = ipc.split(body, most)
        if op == "invoke" and numbers and text and known is not None and text == known.text:
            return _build_run(known.made, numbers, iterations)
        answer = ipc.decode(text)
        if not isinstance(answer, dict) or answer.get("error") is None:
            (found,) = _take(answer, ok=dict)
            if op in ("prepare", "open"):
                return None
            if op == "load":
                return _parse_signature(found)
            if op == "profile":
                return _build_run((_profile(found), None, _parse_repetition(found), None, 0), numbers, 0)
            made = _parse_execution(found)
            if op == "generate":
                end = _NUMBERS + _width(made) * iterations
                return replace(_build_run(made, numbers[:end], iterations), calls=_parse_calls(numbers[end:]))
            if known is not None:
                known.text, known.made = (text, made) if len(text) <= _KEPT_BYTES else (b"", Known.made)
            return _build_run(made, numbers, iterations)
        error = _parse_error(answer["error"], op, kinds)
    except ipc.Garbled as why:
        raise make_response_error(str(why)) from why
    raise error


def make_response_error(why: str) -> RunCrashed:
    """Return the error for an invalid response of a worker."""
    return RunCrashed(f"invalid response from the worker: {why}", hint=_OVERWRITTEN)


def _parse_error(reported: Any, op: str, kinds: frozenset[type[HilError]]) -> HilError:
    if not isinstance(reported, list) or len(reported) != 5 or not all(isinstance(part, str) for part in reported):
        raise ipc.Garbled("an error must consist of five strings")
    # Replace characters that UTF-8 cannot encode, such as file names in other encodings.
    kind, message, hint, detail, code = (part.encode(errors="replace").decode() for part in reported)
    otherwise = LoadFailed if op in ("prepare", "open", "load") else RunFailed
    return make_error(kind, message, hint, detail, code, among=kinds, otherwise=otherwise)


def _parse_signature(found: dict[str, Any]) -> ProgramSignature:
    if isinstance(load_ns := found.get("load_ns"), int) and load_ns < 0:
        raise ClockStepped(-load_ns)
    inputs, outputs, function, load_ns = _take(found, inputs=list, outputs=list, function=str, load_ns=int)
    return ProgramSignature(tuple(map(_parse_spec, inputs)), tuple(map(_parse_spec, outputs)), function, load_ns)


def _build_run(made: _Made, numbers: tuple[int, ...], iterations: int) -> Ran:
    if len(numbers) != _NUMBERS + _width(made) * iterations:
        raise ipc.Garbled("the numbers of timestamps and iterations differ")
    warmup_ns, cpu_ns, peak = numbers[:_NUMBERS]
    if cpu_ns < 0 or peak < 0:
        raise ipc.Garbled("a number is negative")
    middle = _NUMBERS + iterations
    end = middle + iterations
    starts, ends, counts = numbers[_NUMBERS:middle], numbers[middle:end], numbers[end:]
    stamps = itertools.chain.from_iterable(zip(starts, ends, strict=True))
    steps = (later - earlier for earlier, later in itertools.pairwise(stamps))
    if (step_ns := min(warmup_ns, min(steps, default=0))) < 0:
        raise ClockStepped(-step_ns)
    if min(counts, default=1) < 1:
        raise ipc.Garbled("number of instructions out of range")
    outputs, placement, repeated, counted, device_bytes = made
    counted = counted and replace(counted, counts=counts)
    return Ran(
        outputs,
        starts,
        ends,
        warmup_ns,
        cpu_ns,
        peak,
        placement,
        repeated,
        instructions=counted,
        device_bytes=device_bytes,
    )


def _width(made: _Made) -> int:
    """Return the count of numbers per iteration."""
    return 2 if made[3] is None or made[3].problem else 3


def _parse_calls(numbers: tuple[int, ...]) -> tuple[StepCall, ...]:
    if len(numbers) % _CALL_NUMBERS:
        raise ipc.Garbled("the result of a program with steps is incomplete")
    calls = tuple(StepCall(*numbers[at : at + _CALL_NUMBERS]) for at in range(0, len(numbers), _CALL_NUMBERS))
    for call in calls:
        if not 0 <= call.tokens < 1 << 32:
            raise ipc.Garbled("the number of tokens is out of range")
        if call.end_ns < call.start_ns:
            raise ClockStepped(call.start_ns - call.end_ns)
    return calls


def _parse_execution(found: dict[str, Any]) -> _Made:
    placement = None
    if found.get("placement") is not None:
        placement = tuple(map(_parse_part, *_take(found, placement=list)))
    return (
        _parse_outputs(*_take(found, outputs=list)),
        placement,
        _parse_repetition(found),
        _counted(found.get("instructions")),
        _take(found, device_bytes=int)[0] if "device_bytes" in found else 0,
    )


def _counted(found: Any) -> InstructionCounts | None:
    """Return the counter, or why there are no counts; None if the worker does not count."""
    if found is None:
        return None
    counter, problem = _take(found, counter=str, problem=str)
    if len(problem) > _MAX_PROBLEM or counter not in (("",) if problem else AGENT_COUNTERS):
        raise ipc.Garbled("unknown counter of instructions")
    return InstructionCounts(counter, problem=problem)


def _parse_outputs(found: list[Any]) -> tuple[Output, ...]:
    outputs: list[Output] = []
    for one in found:
        outputs.append(_parse_output(one, outputs[-1].end if outputs else 0))
    return tuple(outputs)


def _parse_repetition(found: dict[str, Any]) -> Repeated | None:
    """Return the summary of repeated runs, or None if the response has none."""
    if found.get("answers") is None:
        return None
    listed, sampled, others, differing = _take(found, answers=list, sampled=bool, others=int, differing=list)
    answers: list[RepeatedAnswer] = []
    kept = 0
    for one in listed:
        if not isinstance(one, list) or len(one) != 3:
            raise ipc.Garbled("expected two numbers and then the outputs")
        runs, first, outputs = one
        for number in (runs, first):
            _check(number, int)
        if outputs is not None:
            _check(outputs, list)
            kept += 1
        answers.append(RepeatedAnswer(runs, first, None if outputs is None else _parse_outputs(outputs)))
    for number in differing:
        _check(number, int)
    if max([others, *differing, *(number for one in answers for number in (one.runs, one.first))], default=0) >> 32:
        raise ipc.Garbled("the number of runs is out of range")
    if kept > MAX_KEPT or len(answers) > MAX_ANSWERS:
        raise ipc.Garbled("there are more results than a worker can store")
    return Repeated(tuple(answers), sampled, others, tuple(differing))


def _profile(found: dict[str, Any]) -> tuple[Output, ...]:
    files = _parse_outputs(*_take(found, outputs=list))
    for file in files:
        # The controller creates files with these names, so a name must not be a path.
        plain = file.name.isprintable() and not {"/", "\\"} & set(file.name) and file.name.strip(". ")
        if not plain or len(file.name.encode()) > _MAX_FILE_NAME or file.dtype != "uint8" or len(file.shape) != 1:
            raise ipc.Garbled("a profile must consist of files with plain names")
    return files


def _parse_spec(found: Any) -> TensorSpec:
    name, dtype, shape = _take(found, name=str, dtype=str, shape=list)
    if dtype and dtype not in DTYPES:
        raise ipc.Garbled("a tensor has an unknown dtype")
    for dim in _check_rank(shape):
        if dim is not None:
            _check(dim, str if isinstance(dim, str) else int)
    return TensorSpec(name, dtype, tuple(shape))


def _parse_output(found: Any, begin: int) -> Output:
    """Parse an output that starts at or after ``begin``, the end of the previous output."""
    name, dtype, shape, at, size = _take(found, name=str, dtype=str, shape=list, at=int, bytes=int)
    for dim in _check_rank(shape):
        _check(dim, int)
    if dtype not in DTYPES:
        raise ipc.Garbled("an output has an unknown dtype")
    if dtype != "string" and count_bytes(dtype, shape) != size:
        raise ipc.Garbled("the size of an output does not match its dtype and shape")
    if math.prod(dim or 1 for dim in shape) >= _INT64 >> 4:
        raise ipc.Garbled("an output has an invalid shape")
    # Overlapping outputs would let a program make the agent send the same bytes a thousand times.
    if at < begin:
        raise ipc.Garbled("outputs overlap")
    return Output(name, dtype, tuple(shape), at, size)


def _parse_part(found: Any) -> Part:
    device, nodes, names, elsewhere = _take(found, device=str, nodes=int, names=list, elsewhere=bool)
    reasons = _take(found, reasons=list)[0] if "reasons" in found else []
    for name in names:
        _check(name, str)
    parsed = tuple(map(_parse_reason, reasons))
    named = sum(len(reason.names) for reason in parsed)
    if len(parsed) > MAX_REASONS or max(len(names), named) > MAX_NAMES or nodes >= 1 << 32:
        raise ipc.Garbled("the number of nodes is out of range")
    return Part(device, nodes, tuple(names), elsewhere, parsed)


def _parse_reason(found: Any) -> PlacementReason:
    text, nodes, names = _take(found, text=str, nodes=int, names=list)
    for name in names:
        _check(name, str)
    if len(text) > MAX_REASON_CHARS or nodes >= 1 << 32:
        raise ipc.Garbled("a reason is out of range")
    return PlacementReason(text, nodes, tuple(names))


def _check_rank(shape: list[Any]) -> list[Any]:
    if len(shape) > _MAX_DIMS:
        raise ipc.Garbled(f"a tensor has more than {_MAX_DIMS} dimensions")
    return shape


def _take(found: Any, **kinds: type) -> list[Any]:
    """Return the fields of an object after checking their types."""
    if not isinstance(found, dict):
        raise ipc.Garbled("an object is missing")
    for name, kind in kinds.items():
        _check(found.get(name), kind)
    return [found[name] for name in kinds]


def _check(value: Any, kind: type) -> None:
    """Reject wrong types, numbers out of range, and text that UTF-8 cannot encode."""
    if type(value) is not kind:
        raise ipc.Garbled(f"a value is missing, or is not of type {kind.__name__}")
    if isinstance(value, int) and not 0 <= value < _INT64:
        raise ipc.Garbled("a number is out of range")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ipc.Garbled("a text is not valid Unicode") from error
