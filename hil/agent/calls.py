"""Serve calls of every transport: check the token, sizes and messages, admit the call, and run it."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeAlias

from hil.agent.admission import Admission
from hil.agent.session import CallContext
from hil.errors import BoardRefused, UsageError
from hil.protocol import wire
from hil.protocol.data_connection import RpcMethod

Handler: TypeAlias = "Callable[[Any, CallContext], Any]"

# Size limits for one request, in bytes. Methods that are not listed take SHORT_REQUEST.
SHORT_REQUEST = 1 << 16
_MAX_REQUEST_BYTES = {
    "Put": wire.MAX_DATA + 1024,
    "Missing": wire.MESSAGE_MAX,
    "Load": wire.MESSAGE_MAX,
    "Invoke": wire.MESSAGE_MAX,
}


class Calls:
    """Calls of the agent's methods.

    Args:
        admission: admission control for calls.
        servicers: service name -> handler object.
        token: token that clients must present; "" disables the check.
    """

    def __init__(self, admission: Admission, servicers: Mapping[str, object], token: str) -> None:
        self.admission, self._servicers, self._token = admission, servicers, token

    def check_token(self, given: str) -> None:
        """Check the client's token if the agent requires a token. Raises BoardRefused on a mismatch."""
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            why = "token mismatch" if given else "token required, but none was sent"
            hint = "set HIL_AGENT_TOKEN, or token_file in [connection] of the board's config"
            raise BoardRefused(f"the agent refused the connection: {why}", hint=hint)

    def serve(
        self, method: RpcMethod, requests: Iterator[Any], context: CallContext, handler: Handler | None = None
    ) -> Generator[Any, None, None]:
        """Admit and run a call, and yield its replies.

        Args:
            handler: handler of the method; None selects the agent's handler.

        Raises:
            UsageError: the single request is missing.
            Exception: see :meth:`hil.agent.admission.Admission.admit_call`; also the errors of the handler.
        """
        handler = handler or getattr(self._servicers[method.service], method.name)
        with self.admission.admit_call(method.path, method.streams_requests, requests, context) as admitted:
            request: Any = admitted if method.streams_requests else next(admitted, None)
            if request is None:
                raise UsageError("missing request message")
            replies = handler(request, context)
            yield from replies if method.streams_replies else (replies,)


def check_size(method: str, size: int) -> None:
    """Check the size of a request. Raises UsageError if the request exceeds the method's limit."""
    largest = _MAX_REQUEST_BYTES.get(method, SHORT_REQUEST)
    if size > largest:
        raise UsageError(f"a request of {method} has {size} bytes, maximum {largest}")


def decode_request(data: bytes, decode: Callable[[bytes], Any]) -> Any:
    """Decode a message. Raises UsageError if the bytes are invalid."""
    try:
        return decode(data)
    except Exception as error:
        raise UsageError("the request is not a valid protocol message") from error
