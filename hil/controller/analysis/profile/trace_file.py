"""Write Perfetto's trace format as a stream: tracks, and slices and counters on them.

A trace is a sequence of packets, each preceded by its length. Perfetto's classes serialise most packets. For speed, the
two packets of a slice are built from serialised parts, because there may be millions of slices. Parts that are the same
for every execution, such as the name, are cached. (A protobuf message consists of its concatenated encoded fields.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import IO, Any

from hil.core.varint import encode_varint

Argument = str | int | float

# Maximum names and parts in a stream's cache, here and in readers. When the cache is full, the stream starts a new
# cache.
_MAX_CACHED = 1 << 16


class TraceFile:
    """A trace being written: processes, tracks and event streams."""

    def __init__(self, file: IO[bytes]) -> None:
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

        self.events = 0  # number of slice starts, slice ends and counter values written
        self.write_bytes = file.write
        self._builder = StreamingTraceProtoBuilder(file)
        self._tracks = itertools.count()
        self._processes = itertools.count(1)
        self._sequences = itertools.count(1)
        self._own = self.new_sequence()
        # Write the root track 0, so that readers sort processes by rank.
        self._write_descriptor(process_ordering="PROCESS_ORDERING_EXPLICIT")

    def write(self, **fields: Any) -> None:
        """Write a TracePacket with these fields."""
        packet = self._builder.create_packet()
        for name, value in fields.items():
            if isinstance(value, Mapping):
                getattr(packet, name).MergeFrom(type(getattr(packet, name))(**value))
            else:
                setattr(packet, name, value)
        self._builder.write_packet(packet)

    def write_clocks(self, pairs: Mapping[int, int], *, primary: int | None = None) -> None:
        """Write a snapshot for multiple clocks, by id; ``primary`` is the trace's clock."""
        clocks = [{"clock_id": clock, "timestamp": at} for clock, at in pairs.items()]
        main = {} if primary is None else {"primary_trace_clock": primary}
        self.write(trusted_packet_sequence_id=self._own, clock_snapshot={"clocks": clocks, **main})

    def new_sequence(self) -> int:
        """Return a new packet sequence id."""
        return next(self._sequences)

    def process(self, name: str, labels: Sequence[str] = ()) -> int:
        """Add a process, shown below the earlier ones, and return the track.

        Perfetto's UI v52 ignores the rank and shows processes with more slices first.
        """
        number = next(self._processes)
        process = {"pid": number, "process_name": name, "process_labels": labels}
        return self._write_descriptor(process=process, child_ordering="EXPLICIT", sibling_order_rank=number)

    def track(self, parent: int, name: str, rank: int = 0) -> int:
        """Add a track for slices or child tracks, ordered by rank, and return the new track.

        Equal names under a parent merge.
        """
        return self._write_descriptor(parent_uuid=parent, name=name, child_ordering="EXPLICIT", sibling_order_rank=rank)

    def add_counter(self, parent: int, name: str, unit: str, rank: int = 0) -> int:
        """Add a counter track and return the track."""
        known = {"unit": "UNIT_SIZE_BYTES"} if unit == "bytes" else {"unit_name": unit}
        return self._write_descriptor(parent_uuid=parent, name=name, sibling_order_rank=rank, counter=known)

    def _write_descriptor(self, **fields: Any) -> int:
        track = next(self._tracks)
        self.write(trusted_packet_sequence_id=self._own, track_descriptor={"uuid": track, **fields})
        return track


class Stream:
    """Events on a single clock, on any tracks. Names are written at first use, then referenced by id.

    ``zero`` is subtracted from every time.
    """

    def __init__(self, trace: TraceFile, clock: int, zero: int = 0) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as messages

        self._messages = messages
        self._trace = trace
        self._clock = clock
        self._zero = zero
        self._sequence = trace.new_sequence()
        needs = messages.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        self._head = messages.TracePacket(trusted_packet_sequence_id=self._sequence, sequence_flags=needs)
        self._before_event = _encode_tag(messages.TracePacket.TRACK_EVENT_FIELD_NUMBER)
        self._before_packet = _encode_tag(messages.Trace.PACKET_FIELD_NUMBER)
        self._start_sequence()

    def begin(
        self,
        at: int,
        track: int,
        name: str,
        *,
        category: str = "",
        args: Mapping[str, Argument] | None = None,
        flows: Sequence[int] = (),
        arriving: Sequence[int] = (),
    ) -> None:
        """Start a slice.

        ``flows`` contains the ids of arrows from the slice, and ``arriving`` the ids of arrows to the slice.
        """
        self.renew()
        event = self.slice(track, name, category, args or {})
        self.put(at, event + self._encode_event(flow_ids=flows, terminating_flow_ids=arriving))

    def end(self, at: int, track: int) -> None:
        """End the most recently started slice on a track."""
        self.put(at, self.slice_end(track))

    def count(self, at: int, track: int, value: float) -> None:
        """Set a counter's value from this time on."""
        self.put(at, self._encode_event(type="TYPE_COUNTER", track_uuid=track, double_counter_value=value))

    # The methods below are for many events. They return serialised TrackEvent parts. Concatenate the parts, and pass
    # the result to put().

    def slice(self, track: int, name: str, category: str, args: Mapping[str, Argument]) -> bytes:
        """Serialise a slice start."""
        return self._encode_event(
            type="TYPE_SLICE_BEGIN",
            track_uuid=track,
            name_iid=self._intern_text("event_names", name),
            category_iids=[self._intern_text("event_categories", category)] if category else [],
            debug_annotations=[self._build_annotation(key, value) for key, value in args.items()],
        )

    def slice_end(self, track: int) -> bytes:
        """Serialise a slice end."""
        return self._encode_event(type="TYPE_SLICE_END", track_uuid=track)

    def encode_argument(self, name: str, value: int) -> bytes:
        """Serialise an additional slice argument."""
        kept = self._arguments.get(name)
        if kept is None:
            event = self._messages.TrackEvent(debug_annotations=[self._build_annotation(name, value)])
            kept = self._arguments[name] = event, event.debug_annotations[0]
        # Reuse the two messages, because creating new messages takes four times as long.
        event, annotation = kept
        annotation.int_value = value
        part: bytes = event.SerializeToString()
        return part

    def encode_counter(self, counter: int, value: float) -> bytes:
        """Serialise a counter value that takes effect at this slice's start or end."""
        return self._encode_event(extra_double_counter_track_uuids=[counter], extra_double_counter_values=[value])

    def remember(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """Return the cached part for a key, made at first use. It is valid until the next :meth:`renew`."""
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = make()
        return part

    def renew(self) -> None:
        """Clear all cached names and parts if there are more than the limit."""
        if len(self._parts) + len(self._numbers) > _MAX_CACHED:
            self._start_sequence()

    def put(self, at: int, event: bytes) -> None:
        """Write an event at this time."""
        trace = self._trace
        if self._unwritten:
            self._write_names()
        self._head.timestamp = at - self._zero
        body = self._head.SerializeToString() + self._before_event + encode_varint(len(event)) + event
        trace.write_bytes(self._before_packet + encode_varint(len(body)) + body)
        trace.events += 1

    def _start_sequence(self) -> None:
        self._parts: dict[Hashable, bytes] = {}
        self._arguments: dict[str, tuple[Any, Any]] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._unwritten: dict[str, list[dict[str, Any]]] = {}
        cleared = self._messages.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        self._trace.write(
            trusted_packet_sequence_id=self._sequence,
            sequence_flags=cleared,
            trace_packet_defaults={"timestamp_clock_id": self._clock},
        )

    def _encode_event(self, **fields: Any) -> bytes:
        return bytes(self._messages.TrackEvent(**fields).SerializeToString())

    def _build_annotation(self, name: str, value: Argument) -> Any:
        number = self._intern_text("debug_annotation_names", name)
        if isinstance(value, str):
            text = self._intern_text("debug_annotation_string_values", value)
            return self._messages.DebugAnnotation(name_iid=number, string_value_iid=text)
        field = "double_value" if isinstance(value, float) else "int_value"
        return self._messages.DebugAnnotation(name_iid=number, **{field: value})

    def _intern_text(self, kind: str, text: str) -> int:
        number = self._numbers.get((kind, text))
        if number is None:
            number = self._numbers[kind, text] = len(self._numbers) + 1
            entry = {"iid": number, "str": text.encode()} if kind.endswith("values") else {"iid": number, "name": text}
            self._unwritten.setdefault(kind, []).append(entry)
        return number

    def _write_names(self) -> None:
        needs = self._messages.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        self._trace.write(
            trusted_packet_sequence_id=self._sequence, sequence_flags=needs, interned_data=self._unwritten
        )
        self._unwritten = {}


class Lanes:
    """Group of tracks with a common name, as many as needed for slices that overlap without nesting."""

    def __init__(self, new_track: Callable[[], int]) -> None:
        self._new_track = new_track
        self._lanes: list[tuple[int, list[int]]] = []

    def place(self, start: int, end: int) -> int:
        """Return a track for a slice. Slices must be placed in order of their start."""
        for track, ends in self._lanes:
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                return track
        self._lanes.append((self._new_track(), [end]))
        return self._lanes[-1][0]


def _encode_tag(field: int) -> bytes:
    """Return the tag of a message field. In the message, the length follows the tag."""
    return encode_varint(field << 3 | 2)
