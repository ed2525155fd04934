"""The protocol's limits, and values to and from messages, whichever way these go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

from hil import errors
from hil.core import tensors
from hil.core.digest import SMALL
from hil.core.tensors import Array, TensorSpec
from hil.protocol import wire_errors
from hil.protocol.v1 import agent_pb2 as pb

PROTOCOL = 1
PACKAGE = "hil.v1"
SERVICES = ("Board", "Sessions", "Blobs", "Programs")
SESSION_KEY = "hil-session"

# What one `data` message carries, as hil sends it: as much as a core's own cache holds while it is hashed and copied.
CHUNK = SMALL
DATA_MOST = 1 << 20
INLINE_MAX = 1 << 20
# Of a larger tensor hil sends the data after the message. Inside of one it is copied six times more, each time into
# memory that malloc takes from the system anew: 192 KiB took 0.7 ms instead of 0.3.
INLINE_SENT = 1 << 17
# The largest message: a call's start with its small tensors, or an answer with them.
MESSAGE_MAX = 4 << 20
# What small tensors may take together in one message; what is left of them is streamed.
INLINE_TOTAL = 2 << 20

KEPT_ERRORS = wire_errors.KeptErrors()
"""The long errors of this process's calls, for Logs."""


def pieces(payload: memoryview) -> Iterator[memoryview]:
    """A buffer in pieces of :data:`CHUNK` bytes, each of which a `data` message carries."""
    return (payload[offset : offset + CHUNK] for offset in range(0, payload.nbytes, CHUNK))


def carries_data(message: type[Message]) -> bool:
    """Whether a method's messages of this type may be data."""
    return "data" in message.DESCRIPTOR.fields_by_name


def failure(error: Exception) -> errors.HilError:
    """The error that a caller is told: what is no error of hil's is the agent's own failure."""
    if isinstance(error, errors.HilError):
        return error
    import traceback

    detail = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return errors.BoardLost(f"the agent failed: {type(error).__name__}: {error}", detail=detail)


def spec_to_message(spec: TensorSpec) -> pb.TensorSpec:
    """A tensor's spec as a message."""
    dims = [pb.Dim(size=dim) if isinstance(dim, int) else pb.Dim(symbol=dim or "") for dim in spec.shape]
    return pb.TensorSpec(name=spec.name, dtype=spec.dtype, dims=dims)


def spec_from_message(message: pb.TensorSpec) -> TensorSpec:
    """A tensor's spec from its message."""
    dims = tuple(dim.size if dim.WhichOneof("kind") == "size" else dim.symbol or None for dim in message.dims)
    return TensorSpec(message.name, message.dtype, dims)


def tensor_to_message(
    name: str, dtype: str, shape: Sequence[int], data: memoryview, inline_max: int = INLINE_MAX
) -> tuple[pb.Tensor, bool]:
    """A tensor's message, and whether its data must follow as `data` messages: beyond ``inline_max`` bytes it does."""
    if data.nbytes > inline_max:
        return pb.Tensor(name=name, dtype=dtype, shape=shape, streamed=data.nbytes), True
    return pb.Tensor(name=name, dtype=dtype, shape=shape, inline=data.tobytes()), False


def tensor_from_message(message: pb.Tensor, streamed: Any = None) -> Array:
    """The tensor of a message; ``streamed`` is the buffer that its data came into, when it was streamed.

    Raises:
        UsageError: data, dtype and shape do not fit together.
    """
    data = streamed if message.WhichOneof("payload") == "streamed" else np.frombuffer(message.inline, np.uint8)
    return tensors.from_bytes(data, message.dtype, tuple(message.shape))
