"""A call's inputs, on their way from the wire to a worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hil.agent.shm import Arena, aligned
from hil.agent.store import BlobStore
from hil.core.ordered_executor import StreamHasher
from hil.errors import RunFailed, UsageError
from hil.protocol import wire
from hil.protocol.v1 import agent_pb2 as pb


class Incoming:
    """The inputs of one call on their way into the worker's shared memory.

    Args:
        arena: the worker's shared memory for inputs.
        start: what is coming.
        store: has the inputs that come as blobs.
        reserve: is told how many bytes they take before any memory is taken for them; raises where that is too much.

    Raises:
        UsageError: a tensor inside the message is larger than such may be.
        RunFailed: they take more than there is.
    """

    def __init__(self, arena: Arena, start: pb.InvokeStart, store: BlobStore, reserve: Callable[[int], None]) -> None:
        self.entries: list[dict[str, Any]] = []
        self._streams: list[tuple[int, int]] = []
        self._hashers: list[StreamHasher] = []
        here: list[tuple[int, int, bytes | Path]] = []
        at = 0
        for tensor in start.inputs:
            payload = tensor.WhichOneof("payload")
            if payload == "streamed":
                size = tensor.streamed
                self._streams.append((at, size))
                self._hashers.append(StreamHasher())
            elif payload == "blob":
                path = store.path(tensor.blob)
                size = path.stat().st_size
                here.append((at, size, path))
            else:
                size = len(tensor.inline)
                if size > wire.INLINE_MAX:
                    raise UsageError(f"a tensor inside a message has {size} bytes, and {wire.INLINE_MAX} are the most")
                here.append((at, size, tensor.inline))
            entry = {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            self.entries.append({**entry, "at": at, "bytes": size})
            at += aligned(size)
        reserve(at)
        self.size = at
        self._view = arena.view(at, grow=True)
        for offset, size, source in here:
            target = self._view[offset : offset + size]
            if isinstance(source, Path):
                _read(source, target)
            else:
                target[:] = source
        self._current = 0
        self._done = 0

    @property
    def wants_data(self) -> bool:
        """Whether streamed bytes are still missing."""
        return self._current < len(self._streams)

    @property
    def streamed(self) -> bool:
        """Whether anything was streamed, so that digests follow."""
        return bool(self._streams)

    def add(self, data: memoryview) -> None:
        """The next streamed bytes; a message never spans two tensors.

        Raises:
            UsageError: more came than was announced.
        """
        offset, size = self._streams[self._current]
        if self._done + data.nbytes > size or not data.nbytes:
            raise UsageError("the streamed data does not fit the tensors that were announced")
        at = offset + self._done
        self._view[at : at + data.nbytes] = data
        # What came, and not the memory: a program that still writes there would make it look damaged on its way.
        self._hashers[self._current].update(data)
        self._done += data.nbytes
        if self._done == size:
            self._current += 1
            self._done = 0

    def verify(self, digests: list[str]) -> None:
        """Compare what came with what the sender says it sent.

        Raises:
            UsageError: they differ: the data was damaged on its way.
        """
        if [hasher.digest() for hasher in self._hashers] != digests:
            raise UsageError("the inputs were damaged on their way to the board")


def _read(path: Path, target: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        while target.nbytes and (count := file.readinto(target)):
            target = target[count:]
    if target.nbytes:
        raise RunFailed(f"{path.name} is shorter than it was")
