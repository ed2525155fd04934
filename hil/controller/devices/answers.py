"""What an agent answers, checked before anything else sees it: it may be damaged, of another version, or hostile.

Each function takes a message as it came and raises :class:`hil.errors.ProtocolBroken` where no sane agent would send
it, so that nothing behind this module needs to ask.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hil.core import tensors
from hil.core.repetition import Answer, Repetition
from hil.core.tensors import Array, TensorSpec
from hil.errors import BoardLost, HilError, ProtocolBroken
from hil.protocol import wire
from hil.protocol.v1 import agent_pb2 as pb

KIB, MIB = 1 << 10, 1 << 20
# The largest answer of each method. What is larger never comes into memory: gRPC ends the call.
MESSAGE_LIMITS = {
    ("Board", "Describe"): 256 * KIB,
    ("Board", "Clock"): KIB,
    ("Board", "Logs"): 4 * MIB,
    ("Board", "Counters"): 64 * KIB,
    ("Sessions", "Hold"): 64 * KIB,
    ("Blobs", "Missing"): 4 * MIB,
    ("Blobs", "Put"): KIB,
    ("Blobs", "Get"): 2 * MIB,
    ("Programs", "Load"): 4 * MIB,
    ("Programs", "Invoke"): 16 * MIB,
    ("Programs", "Unload"): KIB,
}
# A log is read to this many characters and lines, then the rest is left out.
LOG_CHARACTERS, LOG_LINES = 16 * MIB, 100_000
READINGS_MOST = 1000
_RUNTIMES_MOST, _PARTS_MOST, _TENSORS_MOST = 100, 1000, 10_000
_RANK_MOST = 32
_ANSWERS_MOST = 1000
# Different answers whose outputs an agent keeps to be fetched: as `hil.agent.iterations.MAX_KEPT`.
_KEPT_MOST = 4
_ELEMENTS_MOST = 1 << 48
_NAME_MOST = 4096
_TTL_MOST_S = 3600.0
# gRPC takes nothing else in metadata.
_TOKEN = re.compile(r"[\x21-\x7e]{1,1024}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
# Of an output: its name, dtype, shape and size; None where there is no data.
_Head: TypeAlias = "tuple[str, str, tuple[int, ...], int | None]"
# Of a call with more outputs than these it is not kept that they are right.
_KEPT_OUTPUTS = 64
# Outputs of a program that says their shapes may be so much larger than it says: some runtimes only warn of that.
_SLACK_BYTES = 64 * MIB


def service_config() -> str:
    """:data:`MESSAGE_LIMITS` as gRPC reads it."""
    methods = [
        {"name": [{"service": f"{wire.PACKAGE}.{service}", "method": method}], "maxResponseMessageBytes": most}
        for (service, method), most in MESSAGE_LIMITS.items()
    ]
    return json.dumps({"methodConfig": methods})


@functools.cache
def most_bytes() -> int:
    """The most that one call's outputs, or one blob, may take here: half of this machine's memory."""
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2


def expected_bytes(specs: Sequence[TensorSpec] | None) -> int:
    """The most that outputs with these specs may take; where a size is not known, :func:`most_bytes`."""
    if specs is None or not all(spec.dtype and spec.dtype != "string" and spec.is_static for spec in specs):
        return most_bytes()
    known = sum(tensors.nbytes_of(spec.dtype, [int(dim or 0) for dim in spec.shape]) for spec in specs)
    return min(known * 2 + _SLACK_BYTES, most_bytes())


def broken(what: str) -> ProtocolBroken:
    """The error of an answer."""
    return ProtocolBroken(
        f"the agent's answer makes no sense: {what}",
        hint="is the agent of the same version of hil, and the link to it sound? `hil board check` tells",
    )


def _expect(sane: bool, otherwise: str) -> None:
    """See that an answer makes sense, or say why it does not."""
    if not sane:
        raise broken(otherwise)


def given(reply: Any) -> Any:
    """An answer, where there is one: a call may end well without."""
    _expect(reply is not None, "there is none")
    return reply


def check_description(reply: pb.DescribeReply) -> None:
    """Check what an agent says of its board."""
    _expect(reply.HasField("machine"), "it says nothing of the machine")
    _few(reply.runtimes, _RUNTIMES_MOST, "runtimes")
    _names([one.name for one in reply.runtimes], "runtimes")
    _readings(reply.readings)
    _finite(reply.holder.held_s, "how long the board is held")


def check_opened(reply: pb.SessionOpened, fence: int) -> None:
    """Check the answer to opening a session with a fence; 0 is none."""
    _expect(bool(_TOKEN.fullmatch(reply.token)), "a session's token is a short text without spaces")
    _expect(0 < reply.ttl_s <= _TTL_MOST_S, f"a session does not last {reply.ttl_s:g} s")
    _expect(fence in (0, reply.fence), f"the session has the fence {reply.fence}, not {fence}")


def waiting_text(reply: pb.SessionWaiting) -> str:
    """Who has the board, for people."""
    holder = reply.holder
    _finite(holder.held_s, "how long the board is held")
    return f"{holder.owner} has the board ({holder.purpose}) for {holder.held_s:.0f} s"


def missing_blobs(reply: pb.MissingReply, asked: Collection[str]) -> dict[str, int]:
    """The blobs that a board lacks, each with how many of its bytes are there."""
    missing = {blob.digest: int(blob.have_bytes) for blob in reply.missing}
    sane = len(missing) == len(reply.missing) and missing.keys() <= set(asked)
    _expect(sane, "it lacks blobs that it was not asked for")
    return missing


def check_offset(offset: int, size: int) -> None:
    """Check how much of a blob of that size a board says it has."""
    _expect(offset <= size, f"it has {offset} bytes of a blob of {size}")


def check_stored(replies: Iterable[pb.PutReply], sent: Sequence[str]) -> None:
    """Check that each blob is acknowledged, in order."""
    stored = []
    for reply in replies:
        stored.append(reply.digest)
        _expect(stored == list(sent[: len(stored)]), "it stored a blob that was not sent")
    _expect(len(stored) == len(sent), "it does not say that it stored what was sent")


def blob_size(reply: Any) -> int:
    """The size of a blob that is going to come."""
    is_start = isinstance(reply, pb.GetReply) and reply.WhichOneof("kind") == "start"
    _expect(is_start, "a blob's data comes before its size")
    return _fitting(int(reply.start.size), most_bytes(), "a blob")


def room_for(size: int) -> Array:
    """Memory for bytes that are announced, where this machine has as much; it is taken only as they come."""
    try:
        return np.empty(size, np.uint8)
    except (MemoryError, ValueError) as error:
        raise broken(f"data of {size >> 20} MiB is more than this machine can hold") from error


def data_of(message: Any, room: int) -> memoryview:
    """The bytes of a data message, which have to fit."""
    if not isinstance(message, memoryview):
        raise broken("it sent something else in place of data that it announced")
    _expect(0 < message.nbytes <= room, "it sent other data than it announced")
    return message


def specs_of(messages: Sequence[pb.TensorSpec], what: str) -> tuple[TensorSpec, ...]:
    """Inputs or outputs of a program."""
    _few(messages, _TENSORS_MOST, what)
    specs = tuple(map(wire.spec_from_message, messages))
    _names([spec.name for spec in specs], what, empty=True)
    size = 0
    for spec in specs:
        known = [dim if isinstance(dim, int) else 1 for dim in spec.shape]
        _dtype(spec.dtype, known=False)
        _shape(known)
        _expect(bool(spec.dtype) or not spec.shape, f"{spec.name[:100]!r} has a shape but no dtype")
        symbols = [dim for dim in spec.shape if isinstance(dim, str)]
        _expect(max(map(len, symbols), default=0) <= _NAME_MOST, "a dimension's name is too long")
        if spec.dtype not in ("", "string"):
            size += tensors.nbytes_of(spec.dtype, known)
    _fitting(size, most_bytes(), what)
    return specs


def check_loaded(reply: pb.LoadReply) -> None:
    """Check what a program is called, now that it is loaded; its tensors are for :func:`specs_of`."""
    is_named = 0 < len(reply.program_id) <= _NAME_MOST and len(reply.function) <= _NAME_MOST
    _expect(is_named, "a loaded program has no name")
    _expect(min(reply.load_ns, reply.worker_pid) >= 0, "a program was not loaded in negative time")


def call_of(message: Any, iterations: int, names: Sequence[str] | None, most: int) -> pb.InvokeDone:
    """The head of a call's answer; its outputs may take ``most`` bytes together."""
    _expect(_is(message, "done"), "data comes before the answer that it belongs to")
    done: pb.InvokeDone = message.done
    starts, ends = len(done.start_ns), len(done.end_ns)
    if not starts == ends == iterations:
        raise broken(f"it tells {starts} starts and {ends} ends of {iterations} iterations")
    heads = tuple([_head(tensor) for tensor in done.outputs])
    # Calls of a program follow each other, and have mostly the same outputs.
    check = _check_outputs if len(heads) <= _KEPT_OUTPUTS else _check_outputs.__wrapped__
    check(heads, None if names is None else tuple(names), most)
    if done.HasField("placement"):
        _few(done.placement.parts, _PARTS_MOST, "parts of a program")
        for part in done.placement.parts:
            _few(part.names, _TENSORS_MOST, "nodes")
    if done.HasField("state"):
        _readings(done.state.readings)
    return done


def repetition_of(done: pb.InvokeDone, start: pb.InvokeStart, outputs: Mapping[str, Array]) -> Repetition | None:
    """Return what a call says of its runs; None where it says nothing of several."""
    is_profile = start.HasField("profile")
    if not done.HasField("repetition"):
        return None
    told = done.repetition
    _few(told.answers, _ANSWERS_MOST, "different answers")
    if not told.answers and is_profile:
        return None  # its profiler gives out no outputs
    firsts = [answer.first for answer in told.answers]
    counted = sum(answer.runs for answer in told.answers) + told.others
    is_whole = counted == start.warmup + start.iterations and firsts[:1] == [0] and told.answers[0].kept
    is_bounded = sum(answer.kept for answer in told.answers) <= _KEPT_MOST and all(one.runs for one in told.answers)
    is_sane = is_whole and is_bounded and firsts == sorted(set(firsts))
    _expect(is_sane, "its answers are not those of the runs")
    names = list(outputs)
    _expect(is_profile or max(told.differing, default=-1) < len(names), "an output differs that there is not")
    return Repetition(
        tuple(
            Answer(answer.runs, answer.first, None if number or is_profile else outputs, answer.kept)
            for number, answer in enumerate(told.answers)
        ),
        told.sampled,
        told.others,
        () if is_profile else tuple(names[number] for number in told.differing),
    )


def output_of(message: pb.Tensor, streamed: Any = None) -> Array:
    """The tensor of an output whose data has come; ``streamed`` is the buffer that it came into."""
    try:
        return wire.tensor_from_message(message, streamed)
    except (HilError, ValueError, MemoryError, OverflowError) as error:
        raise broken(f"output {message.name[:100]!r}: {error}") from error


def check_files(names: Iterable[str]) -> None:
    """Check the names of a profile's files: files of these names are going to be written here."""
    for name in names:
        _expect(bool(_FILE.fullmatch(name)), f"a profile's file cannot be called {name[:100]!r}")


def check_digests(message: Any, computed: Sequence[str]) -> None:
    """Check that what came of a call's outputs is what was sent."""
    _expect(_is(message, "digests"), "it sent more data than it announced")
    if list(message.digests.digests) != list(computed):
        raise BoardLost("the outputs were damaged on their way from the board")


def check_sample(sample: pb.CounterSample) -> None:
    """Check one look at a board's counters."""
    _readings(sample.readings)


def _is(message: Any, kind: str) -> bool:
    """Whether it is a message of that kind, and no data."""
    return not isinstance(message, memoryview) and message.WhichOneof("kind") == kind


def _head(tensor: pb.Tensor) -> _Head:
    shape, kind = tensor.shape, tensor.WhichOneof("payload")
    if len(shape) > _RANK_MOST:
        raise broken(f"a tensor has {len(shape)} dimensions")
    size = len(tensor.inline) if kind == "inline" else int(tensor.streamed) if kind == "streamed" else None
    return tensor.name, tensor.dtype, tuple(shape), size


@functools.lru_cache(maxsize=16)
def _check_outputs(heads: tuple[_Head, ...], names: tuple[str, ...] | None, most: int) -> None:
    """Check outputs by what their heads say; where that is right, it need not be checked again."""
    found = [name for name, *_ in heads]
    if names is not None and found != list(names):
        raise broken(f"it gives the outputs {_listed(found)}, and the program has {_listed(names)}")
    _names(found, "outputs", empty=True)
    total = 0
    for name, dtype, shape, size in heads:
        _dtype(dtype, known=True)
        _shape(shape)
        what = f"output {name[:100]!r}"
        if size is None:
            raise broken(f"{what} has no data")
        if dtype == "string":
            _expect(size >= 4 * math.prod(shape), f"{what} is shorter than its shape")
        else:
            needed = tensors.nbytes_of(dtype, shape)
            _expect(size == needed, f"{what} has {size} bytes, and its shape takes {needed}")
        total += size
    _fitting(total, most, "the outputs")


def _dtype(name: str, *, known: bool) -> None:
    _expect(name in tensors.DTYPES or not (known or name), f"there is no dtype {name[:100]!r}")


def _shape(dims: Sequence[int]) -> None:
    _expect(len(dims) <= _RANK_MOST, f"a tensor has {len(dims)} dimensions")
    _expect(math.prod(max(dim, 1) for dim in dims) <= _ELEMENTS_MOST, "a tensor is larger than any machine")


def _readings(readings: Sequence[pb.Reading]) -> None:
    _few(readings, READINGS_MOST, "readings")
    for reading in readings:
        _expect(bool(reading.name), "a reading has no name")
        _finite(reading.value, f"the reading {reading.name[:100]!r}")


def _finite(value: float, what: str) -> None:
    _expect(math.isfinite(value), f"{what} is {value}")


def _few(items: Sequence[Any], most: int, what: str) -> None:
    _expect(len(items) <= most, f"it tells of {len(items)} {what}")


def _names(names: Sequence[str], what: str, *, empty: bool = False) -> None:
    _expect(len(set(names)) == len(names), f"two of the {what} have one name")
    named = all(len(name) <= _NAME_MOST and (name or empty) for name in names)
    _expect(named, f"one of the {what} has no name, or one too long")


def _fitting(size: int, most: int, what: str) -> int:
    _expect(size <= most, f"{what} of {size >> 20} MiB, where at most {most >> 20} can be")
    return size


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(repr(name[:40]) for name in names[:5])
    return f"{text} and {len(names) - 5} more" if len(names) > 5 else text or "none"
