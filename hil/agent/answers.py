"""What a worker answers, read as if it were the program's own words: a program that means harm can say anything there.

:func:`read` takes the bytes of one message and needs no process: whatever they are, it returns an answer that keeps to
what its class says, or raises an error of the program's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from hil.agent import ipc
from hil.core.results import MOST_NAMES, Part, Placement
from hil.core.tensors import DTYPES, Dim, TensorSpec, nbytes_of
from hil.errors import HilError, LoadFailed, RunCrashed, RunFailed
from hil.protocol.wire_errors import WORKER_KINDS, from_parts

# Two timestamps an iteration, in digits.
_ITERATION_BYTES = 48
# As many as every numpy takes.
_MOST_DIMS = 32
_MOST_FILE_NAME = 200
_INT64 = 1 << 63


@dataclass(frozen=True)
class Prepared:
    """The runtime is ready."""


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


@dataclass(frozen=True)
class Ran:
    """What a run, or a profiling pass, gave."""

    outputs: tuple[Output, ...]  # in the order in which they lie in the arena; none overlaps another
    # start_ns, end_ns: one an iteration; none of a profiling pass.
    start_ns: list[int]
    end_ns: list[int]
    warmup_ns: int
    cpu_ns: int
    peak_bytes: int
    placement: Placement | None = None  # None where nothing new is known

    @property
    def size(self) -> int:
        """How much of the arena the outputs take."""
        return max((output.at + output.size for output in self.outputs), default=0)


Answer: TypeAlias = "Prepared | Signature | Ran"


def most_bytes(iterations: int) -> int:
    """How long an answer to an order of so many iterations may be."""
    return ipc.MOST_BYTES + iterations * _ITERATION_BYTES


def read(body: bytes, op: str, iterations: int = 0) -> Answer:
    """The answer in a worker's message.

    Args:
        op: the order that it answers: prepare, load, invoke or profile.
        iterations: of an invoke.

    Raises:
        LoadFailed, RunFailed, UsageError: what the worker reports instead.
        RunCrashed: it is no answer to that order.
    """
    try:
        said = ipc.decode(body, ipc.MOST_VALUES + 2 * iterations)
        reported = _object(said).get("error")
        if reported is None:
            return _READERS[op](_object(said.get("ok")), iterations)
        error = _error(reported, op)
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
    parts = _list(reported)
    if len(parts) != 4 or not all(isinstance(part, str) for part in parts):
        raise ipc.Garbled("an error is four texts")
    # Of its texts those that cannot be told on, such as a file's name that is no UTF-8, are told with marks in it.
    kind, message, hint, detail = (part.encode(errors="replace").decode() for part in parts)
    otherwise = LoadFailed if op in ("prepare", "load") else RunFailed
    return from_parts(kind, message, hint, detail, among=WORKER_KINDS, otherwise=otherwise)


def _prepared(said: dict[str, Any], _: int) -> Prepared:
    return Prepared()


def _signature(said: dict[str, Any], _: int) -> Signature:
    inputs, outputs = (tuple(_spec(_object(one)) for one in _list(said.get(side))) for side in ("inputs", "outputs"))
    return Signature(inputs, outputs, _text(said.get("function")), _number(said.get("load_ns")))


def _ran(said: dict[str, Any], iterations: int) -> Ran:
    starts, ends = _times(said.get("start_ns"), iterations), _times(said.get("end_ns"), iterations)
    outputs: list[Output] = []
    for one in _list(said.get("outputs")):
        outputs.append(_output(_object(one), outputs[-1].at + outputs[-1].size if outputs else 0))
    placement = said.get("placement")
    return Ran(
        tuple(outputs),
        starts,
        ends,
        _number(said.get("warmup_ns")),
        _number(said.get("cpu_ns")),
        _number(said.get("peak")),
        None if placement is None else tuple(_part(_object(part)) for part in _list(placement)),
    )


def _profiled(said: dict[str, Any], _: int) -> Ran:
    ran = _ran(said, 0)
    for file in ran.outputs:
        # A controller keeps the files under these names.
        plain = file.name.isprintable() and not {"/", "\\"} & set(file.name) and file.name.strip(". ")
        if not plain or len(file.name.encode()) > _MOST_FILE_NAME or file.dtype != "uint8" or len(file.shape) != 1:
            raise ipc.Garbled("a profile is files with plain names")
    return ran


_READERS: dict[str, Callable[[dict[str, Any], int], Answer]] = {
    "prepare": _prepared,
    "load": _signature,
    "invoke": _ran,
    "profile": _profiled,
}


def _spec(said: dict[str, Any]) -> TensorSpec:
    dtype = _text(said.get("dtype"))
    if dtype and dtype not in DTYPES:
        raise ipc.Garbled("a tensor is of no dtype that there is")
    return TensorSpec(_text(said.get("name")), dtype, tuple(_dim(dim) for dim in _dims(said.get("shape"))))


def _output(said: dict[str, Any], begin: int) -> Output:
    """An output that lies behind the last one, which ends at ``begin``."""
    name, dtype = _text(said.get("name")), _text(said.get("dtype"))
    shape = tuple(_number(dim) for dim in _dims(said.get("shape")))
    at, size = _number(said.get("at")), _number(said.get("bytes"))
    if dtype not in DTYPES:
        raise ipc.Garbled("an output is of no dtype that there is")
    if dtype != "string" and nbytes_of(dtype, shape) != size:
        raise ipc.Garbled("an output has another size than its dtype and shape")
    if math.prod(dim or 1 for dim in shape) >= _INT64 >> 4:
        raise ipc.Garbled("an output has a shape that no array can have")
    # One that took the place of another could be sent a thousand times over.
    if at < begin:
        raise ipc.Garbled("an output lies in another one's place")
    return Output(name, dtype, shape, at, size)


def _part(said: dict[str, Any]) -> Part:
    names = tuple(_text(name) for name in _list(said.get("names")))
    elsewhere = said.get("elsewhere")
    if not isinstance(elsewhere, bool) or len(names) > MOST_NAMES:
        raise ipc.Garbled("it is not told where the program ran")
    nodes = _number(said.get("nodes"))
    if nodes >= 1 << 32:
        raise ipc.Garbled("no program has so many nodes")
    return Part(_text(said.get("device")), nodes, names, elsewhere)


def _times(value: Any, count: int) -> list[int]:
    times = _list(value)
    if len(times) != count:
        raise ipc.Garbled("it has not one timestamp an iteration")
    if times and (set(map(type, times)) != {int} or min(times) < -_INT64 or max(times) >= _INT64):
        raise ipc.Garbled("a timestamp is no number of nanoseconds")
    return times


def _dims(value: Any) -> list[Any]:
    dims = _list(value)
    if len(dims) > _MOST_DIMS:
        raise ipc.Garbled(f"a tensor has more than {_MOST_DIMS} dimensions")
    return dims


def _dim(value: Any) -> Dim:
    if value is None:
        return None
    return _text(value) if isinstance(value, str) else _number(value)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _INT64:
        raise ipc.Garbled("a number is none, or far too large")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ipc.Garbled("a text is missing")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ipc.Garbled("a text is no Unicode") from error
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ipc.Garbled("a list is missing")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ipc.Garbled("an object is missing")
    return value
