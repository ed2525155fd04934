"""What a worker answers, read as if it were the program's own words: a program that means harm can say anything there.

:func:`read` takes the bytes of one message and needs no process: whatever they are, it returns an answer that keeps to
what its class says, or raises an error of the program's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from hil.agent import ipc
from hil.agent.iterations import MAX_ANSWERS, MAX_KEPT
from hil.core.results import MOST_NAMES, Part, Placement
from hil.core.tensors import DTYPES, TensorSpec, nbytes_of
from hil.errors import HilError, LoadFailed, RunCrashed, RunFailed
from hil.protocol.wire_errors import WORKER_KINDS, from_parts

# Of a run: how long its warm-up took, its CPU time, the most memory that it took; and two timestamps an iteration.
_NUMBERS = 3
_ITERATION_BYTES = 16
# So long a text about outputs is kept until the next answer, which mostly says the same of them.
_KEPT_BYTES = 1 << 12
# As many as every numpy takes.
_MOST_DIMS = 32
_MOST_FILE_NAME = 200
_INT64 = 1 << 63


@dataclass(frozen=True)
class Signature:
    """What was loaded."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    function: str
    load_ns: int


@dataclass(frozen=True)
class Output:
    """A tensor in the arena of the outputs: ``size`` bytes from ``at`` on, as many as its dtype and shape take."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    size: int

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.at + self.size


@dataclass(frozen=True)
class RepeatedAnswer:
    """One of a call's distinct answers."""

    runs: int
    first: int  # the number of the first run that gave it
    outputs: tuple[Output, ...] | None = None  # None where the worker has not kept them


@dataclass(frozen=True)
class Repeated:
    """What a worker says of the answers of a call's runs."""

    answers: tuple[RepeatedAnswer, ...]
    sampled: bool
    others: int  # runs with further answers
    differing: tuple[int, ...]  # the outputs that differ, by number


@dataclass(frozen=True)
class Ran:
    """What a run, or a profiling pass, gave."""

    outputs: tuple[Output, ...]  # in the order in which they lie in the arena; none overlaps another
    # start_ns, end_ns: one an iteration; none of a profiling pass.
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    warmup_ns: int
    cpu_ns: int
    peak_bytes: int
    placement: Placement | None = None  # None where nothing new is known
    repetition: Repeated | None = None  # None where one run has nothing to be compared with

    @property
    def size(self) -> int:
        """How much of the arena the outputs take."""
        return max((output.end for output in self.outputs), default=0)


Answer: TypeAlias = "Signature | Ran | None"
_Made: TypeAlias = "tuple[tuple[Output, ...], Placement | None, Repeated | None]"


@dataclass
class Known:
    """What a worker said of a run's outputs the last time, and what that was read as."""

    text: bytes = b""
    made: _Made = ((), None, None)


def most_bytes(iterations: int) -> int:
    """How long an answer to an order of so many iterations may be."""
    return ipc.MOST_BYTES + iterations * _ITERATION_BYTES


def read(body: bytes, op: str, iterations: int = 0, known: Known | None = None) -> Answer:
    """The answer in a worker's message to an order; None where the runtime is ready.

    Args:
        op: prepare, load, invoke or profile.
        known: of the worker's last invocation, for this one to read and to replace.

    Raises:
        LoadFailed, RunFailed, UsageError: what the worker reports instead.
        RunCrashed: it is no answer to that order.
    """
    try:
        text, numbers = ipc.split(body, _NUMBERS + 2 * iterations)
        if op == "invoke" and numbers and text and known is not None and text == known.text:
            return _ran(known.made, numbers, iterations)
        answer = ipc.decode(text)
        if not isinstance(answer, dict) or answer.get("error") is None:
            (found,) = _take(answer, ok=dict)
            if op == "prepare":
                return None
            if op == "load":
                return _signature(found)
            if op == "profile":
                return _ran((_profile(found), None, _repeated(found)), numbers, 0)
            made = _made(found)
            if known is not None:
                known.text, known.made = (text, made) if len(text) <= _KEPT_BYTES else (b"", ((), None, None))
            return _ran(made, numbers, iterations)
        error = _error(answer["error"], op)
    except ipc.Garbled as why:
        raise nonsense(str(why)) from why
    raise error


def nonsense(why: str) -> RunCrashed:
    """The error of a program whose worker sent what is no answer."""
    return RunCrashed(
        f"the worker's answer is none: {why}",
        hint="the program, or its runtime, has overwritten the worker's memory or speaks in its place",
    )


def _error(reported: Any, op: str) -> HilError:
    if not isinstance(reported, list) or len(reported) != 4 or not all(isinstance(part, str) for part in reported):
        raise ipc.Garbled("an error is four texts")
    # Of its texts those that cannot be passed on, such as a file's name that is no UTF-8, have marks in them.
    kind, message, hint, detail = (part.encode(errors="replace").decode() for part in reported)
    otherwise = LoadFailed if op in ("prepare", "load") else RunFailed
    return from_parts(kind, message, hint, detail, among=WORKER_KINDS, otherwise=otherwise)


def _signature(found: dict[str, Any]) -> Signature:
    inputs, outputs, function, load_ns = _take(found, inputs=list, outputs=list, function=str, load_ns=int)
    return Signature(tuple(map(_spec, inputs)), tuple(map(_spec, outputs)), function, load_ns)


def _ran(made: _Made, numbers: tuple[int, ...], iterations: int) -> Ran:
    if len(numbers) != _NUMBERS + 2 * iterations:
        raise ipc.Garbled("it has not one timestamp an iteration")
    warmup_ns, cpu_ns, peak = numbers[:_NUMBERS]
    if warmup_ns < 0 or cpu_ns < 0 or peak < 0:
        raise ipc.Garbled("a number is below 0")
    middle = _NUMBERS + iterations
    outputs, placement, repeated = made
    return Ran(outputs, numbers[_NUMBERS:middle], numbers[middle:], warmup_ns, cpu_ns, peak, placement, repeated)


def _made(found: dict[str, Any]) -> _Made:
    placement = None
    if found.get("placement") is not None:
        placement = tuple(map(_part, *_take(found, placement=list)))
    return _outputs(*_take(found, outputs=list)), placement, _repeated(found)


def _outputs(found: list[Any]) -> tuple[Output, ...]:
    outputs: list[Output] = []
    for one in found:
        outputs.append(_output(one, outputs[-1].end if outputs else 0))
    return tuple(outputs)


def _repeated(found: dict[str, Any]) -> Repeated | None:
    """Return what is told of the answers of several runs, if anything is."""
    if found.get("answers") is None:
        return None
    listed, sampled, others, differing = _take(found, answers=list, sampled=bool, others=int, differing=list)
    answers: list[RepeatedAnswer] = []
    kept = 0
    for one in listed:
        if not isinstance(one, list) or len(one) != 3:
            raise ipc.Garbled("an answer is two numbers and its outputs")
        runs, first, outputs = one
        for number in (runs, first):
            _check(number, int)
        if outputs is not None:
            _check(outputs, list)
            kept += 1
        answers.append(RepeatedAnswer(runs, first, None if outputs is None else _outputs(outputs)))
    for number in differing:
        _check(number, int)
    if max([others, *differing, *(number for one in answers for number in (one.runs, one.first))], default=0) >> 32:
        raise ipc.Garbled("no call has so many runs")
    if kept > MAX_KEPT or len(answers) > MAX_ANSWERS:
        raise ipc.Garbled("it has more answers than a worker keeps")
    return Repeated(tuple(answers), sampled, others, tuple(differing))


def _profile(found: dict[str, Any]) -> tuple[Output, ...]:
    files = _outputs(*_take(found, outputs=list))
    for file in files:
        # A controller keeps the files under these names.
        plain = file.name.isprintable() and not {"/", "\\"} & set(file.name) and file.name.strip(". ")
        if not plain or len(file.name.encode()) > _MOST_FILE_NAME or file.dtype != "uint8" or len(file.shape) != 1:
            raise ipc.Garbled("a profile is files with plain names")
    return files


def _spec(found: Any) -> TensorSpec:
    name, dtype, shape = _take(found, name=str, dtype=str, shape=list)
    if dtype and dtype not in DTYPES:
        raise ipc.Garbled("a tensor is of no dtype that there is")
    for dim in _checked_rank(shape):
        if dim is not None:
            _check(dim, str if isinstance(dim, str) else int)
    return TensorSpec(name, dtype, tuple(shape))


def _output(found: Any, begin: int) -> Output:
    """An output that lies behind the last one, which ends at ``begin``."""
    name, dtype, shape, at, size = _take(found, name=str, dtype=str, shape=list, at=int, bytes=int)
    for dim in _checked_rank(shape):
        _check(dim, int)
    if dtype not in DTYPES:
        raise ipc.Garbled("an output is of no dtype that there is")
    if dtype != "string" and nbytes_of(dtype, shape) != size:
        raise ipc.Garbled("an output has another size than its dtype and shape")
    if math.prod(dim or 1 for dim in shape) >= _INT64 >> 4:
        raise ipc.Garbled("an output has a shape that no array can have")
    # One that took the place of another could be sent a thousand times over.
    if at < begin:
        raise ipc.Garbled("an output lies in another one's place")
    return Output(name, dtype, tuple(shape), at, size)


def _part(found: Any) -> Part:
    device, nodes, names, elsewhere = _take(found, device=str, nodes=int, names=list, elsewhere=bool)
    for name in names:
        _check(name, str)
    if len(names) > MOST_NAMES or nodes >= 1 << 32:
        raise ipc.Garbled("no program has so many nodes")
    return Part(device, nodes, tuple(names), elsewhere)


def _checked_rank(shape: list[Any]) -> list[Any]:
    if len(shape) > _MOST_DIMS:
        raise ipc.Garbled(f"a tensor has more than {_MOST_DIMS} dimensions")
    return shape


def _take(found: Any, **kinds: type) -> list[Any]:
    """The fields of an object, each of its kind."""
    if not isinstance(found, dict):
        raise ipc.Garbled("an object is missing")
    for name, kind in kinds.items():
        _check(found.get(name), kind)
    return [found[name] for name in kinds]


def _check(value: Any, kind: type) -> None:
    """Refuse what is of another kind, a number that is below 0 or far too large, and a text that is no Unicode."""
    if type(value) is not kind:
        raise ipc.Garbled(f"a value is missing, or is no {kind.__name__}")
    if isinstance(value, int) and not 0 <= value < _INT64:
        raise ipc.Garbled("a number is below 0, or far too large")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ipc.Garbled("a text is no Unicode") from error
