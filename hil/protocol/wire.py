"""Define limits of the protocol, and convert between values and messages."""

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

# Payload size for the `data` messages that hil sends. During hashing and copying, the payload fits into a core's
# private cache.
CHUNK = SMALL
MAX_DATA = 1 << 20
INLINE_MAX = 1 << 20
# Maximum size for inline data. hil streams larger tensors after the message. Inline data is copied six more times into
# newly allocated memory: 192 KiB took 0.7 ms instead of 0.3 ms.
INLINE_SENT = 1 << 17
# Maximum message size: the start of a call, or a response, with small tensors.
MESSAGE_MAX = 4 << 20
# Maximum total size of inline tensors in a message; the rest is streamed.
INLINE_TOTAL = 2 << 20

KEPT_ERRORS = wire_errors.KeptErrors()
"""Long errors of this process's calls, for Logs."""


def split_pieces(payload: memoryview) -> Iterator[memoryview]:
    """Split a buffer into pieces of :data:`CHUNK` bytes for `data` messages."""
    return (payload[offset : offset + CHUNK] for offset in range(0, payload.nbytes, CHUNK))


def may_contain_data(message: type[Message]) -> bool:
    """Return True if messages of this type may contain data."""
    return "data" in message.DESCRIPTOR.fields_by_name


def make_reported_error(error: Exception) -> errors.HilError:
    """Return the error to report to the client. Unexpected exceptions become BoardLost, a failure of the agent."""
    if isinstance(error, errors.HilError):
        return error
    import traceback

    detail = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return errors.BoardLost(f"the agent failed: {type(error).__name__}: {error}", detail=detail)


def encode_spec(spec: TensorSpec) -> pb.TensorSpec:
    """Convert a tensor spec to a message."""
    dims = [pb.Dim(size=dim) if isinstance(dim, int) else pb.Dim(symbol=dim or "") for dim in spec.shape]
    return pb.TensorSpec(name=spec.name, dtype=spec.dtype, dims=dims)


def decode_spec(message: pb.TensorSpec) -> TensorSpec:
    """Convert a message to a tensor spec."""
    dims = tuple(dim.size if dim.WhichOneof("kind") == "size" else dim.symbol or None for dim in message.dims)
    return TensorSpec(message.name, message.dtype, dims)


def encode_tensor(
    name: str, dtype: str, shape: Sequence[int], data: memoryview, inline_max: int = INLINE_MAX
) -> tuple[pb.Tensor, bool]:
    """Return a tensor's message, and True if more than ``inline_max`` bytes of data must follow as `data` messages."""
    if data.nbytes > inline_max:
        return pb.Tensor(name=name, dtype=dtype, shape=shape, streamed=data.nbytes), True
    return pb.Tensor(name=name, dtype=dtype, shape=shape, inline=data.tobytes()), False


def decode_tensor(message: pb.Tensor, streamed: Any = None) -> Array:
    """Return the tensor of a message. ``streamed`` is the buffer with streamed data.

    Raises:
        UsageError: the data size does not match the dtype and shape.
    """
    data = streamed if message.WhichOneof("payload") == "streamed" else np.frombuffer(message.inline, np.uint8)
    return tensors.from_bytes(data, message.dtype, tuple(message.shape))
