"""Validate agent responses before other modules use them.

Responses may be corrupt, from another version, or hostile. Each function takes a raw message and raises
:class:`hil.errors.ProtocolBroken` if the message is invalid. Other modules need no further checks.
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
from hil.core.cpuinfo import MAX_READING
from hil.core.instructions import AGENT_COUNTERS, InstructionCounts
from hil.core.placement_reasons import MAX_NAMES, MAX_REASON_CHARS, MAX_REASONS, PlacementReason
from hil.core.repetition import Answer, Repetition
from hil.core.results import Part, Placement
from hil.core.stack_config import MAX_PARTS
from hil.core.steps import MAX_CALLS, StepCall
from hil.core.tensors import Array, TensorSpec
from hil.errors import BoardLost, HilError, ProtocolBroken
from hil.protocol import wire
from hil.protocol.v1 import agent_pb2 as pb

KIB, MIB = 1 << 10, 1 << 20
# Maximum response size per method. gRPC ends the call before a larger response is read into memory.
MESSAGE_LIMITS = {
    ("Board", "Describe"): 256 * KIB,
    ("Board", "Clock"): KIB,
    ("Board", "Logs"): 4 * MIB,
    ("Board", "Counters"): 64 * KIB,
    ("Board", "Power"): 64 * KIB,
    ("Sessions", "Hold"): 64 * KIB,
    ("Blobs", "Missing"): 4 * MIB,
    ("Blobs", "Put"): KIB,
    ("Blobs", "Get"): 2 * MIB,
    ("Programs", "Load"): 4 * MIB,
    ("Programs", "Invoke"): 16 * MIB,
    ("Programs", "Unload"): KIB,
}
# Maximum characters and lines to read from a log. The rest is dropped.
LOG_CHARACTERS, LOG_LINES = 16 * MIB, 100_000
MAX_READINGS = 1000
MAX_POWER_SAMPLES = 4096
_MAX_DEVICES = 1000
_RUNTIMES_MOST, _PARTS_MOST, _TENSORS_MOST, _NODES_MOST = 100, 1000, 10_000, 200_000
_MAX_RANK = 32
_MAX_ANSWERS = 1000
# An agent stores the outputs for at most this many different results. Same value as `hil.agent.iterations.MAX_KEPT`.
_MAX_STORED_ANSWERS = 4
_MAX_ELEMENTS = 1 << 48
_MAX_NAME = 4096
_MAX_PROBLEM = 1000
_INT64_MOST = (1 << 63) - 1
# Maximum characters in the owner and in the purpose of a session.
_HOLDER_CHARACTERS = 200
_MAX_TTL_SECONDS = 3600.0
# gRPC metadata values allow only these characters.
_TOKEN = re.compile(r"[\x21-\x7e]{1,1024}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
# Name, dtype, shape and data size of an output; the size is None if the output has no data.
_Head: TypeAlias = "tuple[str, str, tuple[int, ...], int | None]"
# Cache successful output checks only for calls with at most this many outputs.
_MAX_CACHED_OUTPUTS = 64
# Outputs may be larger than the program declares, by this number of bytes. Some runtimes only warn about larger
# outputs.
_SLACK_BYTES = 64 * MIB


def make_service_config() -> str:
    """Return :data:`MESSAGE_LIMITS` as a gRPC service config."""
    methods = [
        {"name": [{"service": f"{wire.PACKAGE}.{service}", "method": method}], "maxResponseMessageBytes": most}
        for (service, method), most in MESSAGE_LIMITS.items()
    ]
    return json.dumps({"methodConfig": methods})


@functools.cache
def max_output_bytes() -> int:
    """Return the size limit for one call's outputs or one blob: half of this machine's memory."""
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2


def max_expected_bytes(specs: Sequence[TensorSpec] | None) -> int:
    """Return the size limit for outputs with these specs.

    The limit is :func:`max_output_bytes` if any size is unknown.
    """
    if specs is None or not all(spec.dtype and spec.dtype != "string" and spec.is_static for spec in specs):
        return max_output_bytes()
    known = sum(tensors.count_bytes(spec.dtype, [int(dim or 0) for dim in spec.shape]) for spec in specs)
    return min(known * 2 + _SLACK_BYTES, max_output_bytes())


def make_protocol_error(what: str) -> ProtocolBroken:
    """Return the error for an invalid response."""
    return ProtocolBroken(
        f"invalid agent response: {what}",
        hint="check the agent's version and the connection with `hil board check`",
    )


def _expect(sane: bool, otherwise: str) -> None:
    if not sane:
        raise make_protocol_error(otherwise)


def require_reply(reply: Any) -> Any:
    """Return the response, or raise ProtocolBroken if it is None: a call can end successfully without a response."""
    _expect(reply is not None, "the response is missing")
    return reply


def check_description(reply: pb.DescribeReply) -> None:
    """Check the response of Describe."""
    _expect(reply.HasField("machine"), "the machine description is missing")
    _check_count(reply.runtimes, _RUNTIMES_MOST, "runtimes")
    _check_names([one.name for one in reply.runtimes], "runtimes")
    for runtime in reply.runtimes:
        _check_count(runtime.device_details, _MAX_DEVICES, f"devices of the runtime {runtime.name[:100]!r}")
    _check_readings(reply.readings)
    _check_count(reply.stack, MAX_PARTS, "parts of the stack")
    _check_finite(reply.holder.held_s, "time the board is in use")


def check_opened(reply: pb.SessionOpened, fence: int) -> None:
    """Check the response to opening a session. If the requested ``fence`` is 0, the agent may choose any fence."""
    _expect(bool(_TOKEN.fullmatch(reply.token)), "the session token must be a short text without spaces")
    _expect(0 < reply.ttl_s <= _MAX_TTL_SECONDS, f"invalid session TTL: {reply.ttl_s:g} s")
    _expect(fence in (0, reply.fence), f"the session has fence {reply.fence}, expected {fence}")


def describe_holder(reply: pb.SessionWaiting) -> str:
    """Describe the current holder of the board for messages."""
    holder = reply.holder
    _check_finite(holder.held_s, "time the board is in use")
    owner, purpose = holder.owner[:_HOLDER_CHARACTERS], holder.purpose[:_HOLDER_CHARACTERS]
    return f"{owner} has used the board for {holder.held_s:.0f} s ({purpose})"


def read_missing_blobs(reply: pb.MissingReply, asked: Collection[str]) -> dict[str, int]:
    """Return the digests of the missing blobs, each with the number of bytes that the board already has."""
    _check_count(reply.missing, len(asked), "missing blobs")
    missing = {blob.digest: int(blob.have_bytes) for blob in reply.missing}
    sane = len(missing) == len(reply.missing) and missing.keys() <= set(asked)
    _expect(sane, "it lists missing blobs that hil did not request")
    return missing


def check_offset(offset: int, size: int) -> None:
    """Check the number of bytes that a board reports for a blob of ``size`` bytes."""
    _expect(offset <= size, f"it reports {offset} bytes of a blob of {size} bytes")


def check_stored(replies: Iterable[pb.PutReply], sent: Sequence[str]) -> None:
    """Check that each blob is acknowledged, in order."""
    stored = []
    for reply in replies:
        stored.append(reply.digest)
        _expect(stored == list(sent[: len(stored)]), "it reports a blob that was not sent as stored")
    _expect(len(stored) == len(sent), "it does not confirm all sent blobs as stored")


def read_blob_size(reply: Any) -> int:
    """Return the size of a blob from the first message of Get."""
    is_start = isinstance(reply, pb.GetReply) and reply.WhichOneof("kind") == "start"
    _expect(is_start, "blob data precedes the blob size")
    return _check_size(int(reply.start.size), max_output_bytes(), "a blob")


def allocate_buffer(size: int) -> Array:
    """Allocate a buffer for announced data. The kernel provides pages only as data arrives.

    Raises ProtocolBroken if this machine cannot allocate ``size`` bytes.
    """
    try:
        return np.empty(size, np.uint8)
    except (MemoryError, ValueError) as error:
        raise make_protocol_error(f"data of {size >> 20} MiB exceeds this machine's memory") from error


def read_data(message: Any, room: int) -> memoryview:
    """Return the bytes of a data message, which must fit into ``room`` bytes."""
    if not isinstance(message, memoryview):
        raise make_protocol_error("expected the announced data, got a different message")
    _expect(0 < message.nbytes <= room, "data does not match the announced size")
    return message


def parse_specs(messages: Sequence[pb.TensorSpec], what: str) -> tuple[TensorSpec, ...]:
    """Parse and check the specs of a program's inputs or outputs."""
    _check_count(messages, _TENSORS_MOST, what)
    specs = tuple(map(wire.decode_spec, messages))
    _check_names([spec.name for spec in specs], what, empty=True)
    size = 0
    for spec in specs:
        known = [dim if isinstance(dim, int) else 1 for dim in spec.shape]
        _check_dtype(spec.dtype, known=False)
        _shape(known)
        _expect(bool(spec.dtype) or not spec.shape, f"{spec.name[:100]!r} has a shape but no dtype")
        symbols = [dim for dim in spec.shape if isinstance(dim, str)]
        _expect(
            max(map(len, symbols), default=0) <= _MAX_NAME, f"a dimension name has more than {_MAX_NAME} characters"
        )
        if spec.dtype not in ("", "string"):
            size += tensors.count_bytes(spec.dtype, known)
    _check_size(size, max_output_bytes(), what)
    return specs


def check_loaded(reply: pb.LoadReply) -> None:
    """Check the response of Load, except tensor specs (see :func:`parse_specs`)."""
    is_named = 0 < len(reply.program_id) <= _MAX_NAME and len(reply.function) <= _MAX_NAME
    _expect(is_named, "a loaded program has an invalid name")
    _expect(min(reply.load_ns, reply.worker_pid) >= 0, "load time or worker PID is negative")


def call_of(message: Any, iterations: int, names: Sequence[str] | None, most: int) -> pb.InvokeDone:
    """Check and return the head of an Invoke response. All outputs together may take at most ``most`` bytes."""
    _expect(_is(message, "done"), "output data precedes the result")
    done: pb.InvokeDone = message.done
    _check_count(done.outputs, _TENSORS_MOST, "outputs")
    starts, ends = len(done.start_ns), len(done.end_ns)
    if not starts == ends == iterations:
        raise make_protocol_error(f"expected {iterations} iterations, got {starts} start and {ends} end times")
    heads = tuple([_check_head(tensor) for tensor in done.outputs])
    # Cache the checks, because consecutive calls usually have outputs with the same shapes.
    check = _check_outputs if len(heads) <= _MAX_CACHED_OUTPUTS else _check_outputs.__wrapped__
    check(heads, None if names is None else tuple(names), most)
    if done.HasField("placement"):
        _check_count(done.placement.parts, _PARTS_MOST, "parts of a program")
        _expect(
            sum(len(part.names) for part in done.placement.parts) <= _NODES_MOST, f"more than {_NODES_MOST} node names"
        )
        for part in done.placement.parts:
            _check_reasons(part.reasons)
    if done.HasField("state"):
        _check_readings(done.state.readings)
    return done


def _check_reasons(reasons: Sequence[pb.PlacementReason]) -> None:
    _check_count(reasons, MAX_REASONS, "reasons of a part")
    _expect(sum(len(reason.names) for reason in reasons) <= MAX_NAMES, f"reasons with more than {MAX_NAMES} node names")
    _expect(
        all(len(reason.text) <= MAX_REASON_CHARS for reason in reasons),
        f"a reason with more than {MAX_REASON_CHARS} characters",
    )


def parse_placement(done: pb.InvokeDone) -> Placement | None:
    """Return where a program ran, or None if the agent does not report it."""
    if not done.HasField("placement"):
        return None
    return tuple(
        Part(
            part.device,
            part.nodes,
            tuple(part.names),
            part.elsewhere,
            tuple(PlacementReason(one.text, one.nodes, tuple(one.names)) for one in part.reasons),
        )
        for part in done.placement.parts
    )


def parse_calls(done: pb.InvokeDone, start: pb.InvokeStart) -> tuple[StepCall, ...]:
    """Return the calls of a stepped program."""
    _expect(start.HasField("steps") or not done.calls, "it reports steps that hil did not request")
    _check_count(done.calls, MAX_CALLS, "calls")
    stamps = [stamp for call in done.calls for stamp in (call.start_ns, call.end_ns)]
    _expect(stamps == sorted(stamps) and min(stamps, default=0) >= 0, "times of calls decrease")
    return tuple(StepCall(call.tokens, call.start_ns, call.end_ns) for call in done.calls)


def instructions_of(done: pb.InvokeDone, iterations: int) -> InstructionCounts | None:
    """Return the instructions of the iterations; None if the response has none."""
    if not done.HasField("instructions"):
        return None
    found = done.instructions
    problem, counts = found.problem, tuple(found.counts)
    if problem:
        _expect(len(problem) <= _MAX_PROBLEM, "the reason for missing instruction counts is too long")
        _expect(not counts and not found.counter, "it reports instructions that it did not count")
        return InstructionCounts(problem="".join(one if one.isprintable() else " " for one in problem))
    _expect(found.counter in AGENT_COUNTERS, f"unknown counter of instructions {found.counter[:100]!r}")
    _expect(len(counts) == iterations, f"expected instructions of {iterations} iterations, got {len(counts)}")
    _expect(min(counts) > 0 and max(counts) <= _INT64_MOST, "number of instructions out of range")
    return InstructionCounts(found.counter, counts)


def parse_repetition(done: pb.InvokeDone, start: pb.InvokeStart, outputs: Mapping[str, Array]) -> Repetition | None:
    """Return the comparison of the call's runs, or None if the response has none."""
    is_profile = start.HasField("profile")
    if not done.HasField("repetition"):
        return None
    told = done.repetition
    _check_count(told.answers, _MAX_ANSWERS, "different answers")
    _check_count(told.differing, _TENSORS_MOST, "differing outputs")
    if not told.answers and is_profile:
        return None  # the profiler returns no outputs
    firsts = [answer.first for answer in told.answers]
    counted = sum(answer.runs for answer in told.answers) + told.others
    is_whole = counted == start.warmup + start.iterations and firsts[:1] == [0] and told.answers[0].kept
    is_bounded = sum(answer.kept for answer in told.answers) <= _MAX_STORED_ANSWERS and all(
        one.runs for one in told.answers
    )
    is_sane = is_whole and is_bounded and firsts == sorted(set(firsts))
    _expect(is_sane, "invalid list of distinct results")
    names = list(outputs)
    _expect(is_profile or max(told.differing, default=-1) < len(names), "it reports a mismatch in an unknown output")
    return Repetition(
        tuple(
            Answer(answer.runs, answer.first, None if number or is_profile else outputs, answer.kept)
            for number, answer in enumerate(told.answers)
        ),
        told.sampled,
        told.others,
        () if is_profile else tuple(names[number] for number in told.differing),
    )


def parse_output(message: pb.Tensor, streamed: Any = None) -> Array:
    """Return the tensor of a received output. ``streamed`` is the buffer of streamed data."""
    try:
        return wire.decode_tensor(message, streamed)
    except (HilError, ValueError, MemoryError, OverflowError) as error:
        raise make_protocol_error(f"output {message.name[:100]!r}: {error}") from error


def check_files(names: Iterable[str]) -> None:
    """Check the names of a profile's files, because hil writes files with these names on this machine."""
    for name in names:
        _expect(bool(_FILE.fullmatch(name)), f"invalid profile file name {name[:100]!r}")


def check_digests(message: Any, computed: Sequence[str]) -> None:
    """Check the digests of the received outputs. Raises BoardLost on a mismatch."""
    _expect(_is(message, "digests"), "the agent sent more data than it announced")
    if list(message.digests.digests) != list(computed):
        raise BoardLost("the outputs were corrupted during download")


def check_sample(sample: pb.CounterSample) -> None:
    """Check one sample of a board's counters."""
    _check_readings(sample.readings)


def check_power_samples(message: pb.PowerSamples) -> None:
    """Check a message with samples of a board's power sensor. Within the message, the times increase."""
    times = np.array(message.clock_ns, np.int64)
    _expect(times.size == len(message.values) <= MAX_POWER_SAMPLES, "the meter's times and values do not match")
    _expect(bool((np.diff(times) > 0).all()), "the meter's times do not increase")
    _expect(bool(np.isfinite(np.array(message.values, np.float64)).all()), "a value of the meter is not a number")


def _is(message: Any, kind: str) -> bool:
    return not isinstance(message, memoryview) and message.WhichOneof("kind") == kind


def _check_head(tensor: pb.Tensor) -> _Head:
    shape, kind = tensor.shape, tensor.WhichOneof("payload")
    if len(shape) > _MAX_RANK:
        raise make_protocol_error(f"a tensor has {len(shape)} dimensions")
    size = len(tensor.inline) if kind == "inline" else int(tensor.streamed) if kind == "streamed" else None
    return tensor.name, tensor.dtype, tuple(shape), size


@functools.lru_cache(maxsize=16)
def _check_outputs(heads: tuple[_Head, ...], names: tuple[str, ...] | None, most: int) -> None:
    """Check the heads of outputs. Only successful checks are cached."""
    found = [name for name, *_ in heads]
    if names is not None and found != list(names):
        raise make_protocol_error(
            f"outputs do not match the program: got {_join_names(found)}, expected {_join_names(names)}"
        )
    _check_names(found, "outputs", empty=True)
    total = 0
    for name, dtype, shape, size in heads:
        _check_dtype(dtype, known=True)
        _shape(shape)
        what = f"output {name[:100]!r}"
        if size is None:
            raise make_protocol_error(f"{what} has no data")
        if dtype == "string":
            _expect(size >= 4 * math.prod(shape), f"{what} has {size} bytes, fewer than the shape requires")
        else:
            needed = tensors.count_bytes(dtype, shape)
            _expect(size == needed, f"{what} has {size} bytes, expected {needed} for the shape")
        total += size
    _check_size(total, most, "the outputs")


def _check_dtype(name: str, *, known: bool) -> None:
    _expect(name in tensors.DTYPES or not (known or name), f"unknown dtype {name[:100]!r}")


def _shape(dims: Sequence[int]) -> None:
    _expect(len(dims) <= _MAX_RANK, f"a tensor has {len(dims)} dimensions")
    _expect(math.prod(max(dim, 1) for dim in dims) <= _MAX_ELEMENTS, "tensor size exceeds the limit")


def _check_readings(readings: Sequence[pb.Reading]) -> None:
    _check_count(readings, MAX_READINGS, "readings")
    for reading in readings:
        _expect(bool(reading.name), "missing name of a reading")
        _expect(abs(reading.value) <= MAX_READING, f"the reading {reading.name[:100]!r} is {reading.value}")


def _check_finite(value: float, what: str) -> None:
    _expect(math.isfinite(value), f"{what} is {value}")


def _check_count(items: Sequence[Any], most: int, what: str) -> None:
    _expect(len(items) <= most, f"{len(items)} {what}, maximum {most}")


def _check_names(names: Sequence[str], what: str, *, empty: bool = False) -> None:
    _expect(len(set(names)) == len(names), f"duplicate name among the {what}")
    named = all(len(name) <= _MAX_NAME and (name or empty) for name in names)
    _expect(named, f"missing or overlong name among the {what}")


def _check_size(size: int, most: int, what: str) -> int:
    _expect(size <= most, f"{what} of {size >> 20} MiB exceeds the limit of {most >> 20} MiB")
    return size


def _join_names(names: Sequence[str]) -> str:
    text = ", ".join(repr(name[:40]) for name in names[:5])
    return f"{text} and {len(names) - 5} more" if len(names) > 5 else text or "none"
