"""Calls to one agent, over data connections if available and otherwise over gRPC."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from hil.controller.devices.agent_client.call import Call, CallFailed, CallStream
from hil.controller.devices.agent_client.data_stream import DataConnections, NoDataConnection
from hil.controller.devices.board_client import AgentEndpoint
from hil.errors import UsageError
from hil.protocol import wire_errors
from hil.protocol.data_connection import METHODS, get_data_path

if TYPE_CHECKING:
    from hil.controller.devices.agent_client.grpc_stream import GrpcChannel


# Timeout in seconds for an agent to accept a call. If the connection is open and silent for longer, the agent hangs.
OPEN_SECONDS = 15.0


class AgentCalls:
    """Calls to the agent at an address. Raises the errors of :class:`~.grpc_stream.GrpcChannel`.

    Attributes:
        fallback: Why the last call used gRPC although a data-connection socket exists; "" if the last call did not use
            gRPC.
    """

    def __init__(self, target: AgentEndpoint) -> None:
        self.fallback = ""
        self._target = target
        is_protected = target.ca or target.cert or target.key
        path = "" if is_protected else get_data_path(target.address)
        self._data = DataConnections(path, target.token) if path else None
        self._grpc: GrpcChannel | None = None
        self._lock = threading.Lock()
        self._open: weakref.WeakKeyDictionary[Call, str] = weakref.WeakKeyDictionary()  # values: session tokens
        if self._data is None:
            self._open_grpc()

    def begin(self, method: str, session: str = "", *, within_s: float = OPEN_SECONDS, waits: bool = False) -> Call:
        """Begin a call over a data connection, or over gRPC if no data connection is available.

        Args:
            session: Token of the call's session; "" for none.
            within_s: How long the agent may take to accept the call, in seconds.
            waits: Whether receiving waits for a gRPC connection that is not yet established.

        Raises:
            CallFailed: The agent refuses the call or hangs.
        """
        stream: CallStream | None = self._call_over_data(method, session, within_s)
        call = Call(METHODS[method], stream or self._open_grpc().open(method, session, waits=waits))
        with self._lock:
            self._open[call] = session
        return call

    def cancel(self, session: str) -> None:
        """Cancel the calls of a session; "" cancels all."""
        with self._lock:
            calls = [call for call, token in self._open.items() if session in ("", token)]
        for call in calls:
            call.cancel()

    def is_answered(self, within_s: float) -> bool:
        """Return whether an agent accepts calls. A busy agent accepts calls; a hanging agent does not."""
        try:
            if stream := self._call_over_data("Clock", "", within_s):
                stream.cancel()
                return True
        except CallFailed as error:
            return error.code != "DEADLINE_EXCEEDED"  # a refusal is also a response
        return self._open_grpc().is_answered(within_s)

    def close(self) -> None:
        """Cancel all calls and disconnect."""
        self.cancel("")
        if self._data is not None:
            self._data.close()
        if self._grpc is not None:
            self._grpc.close()

    def _call_over_data(self, method: str, session: str, within_s: float) -> CallStream | None:
        self.fallback = ""
        if self._data is None:
            return None
        try:
            return self._data.open(method, session, within_s)
        except NoDataConnection as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                self.fallback = str(error)
            return None
        except CallFailed as error:
            # Agents of an older hil support fewer methods on data connections.
            if isinstance(wire_errors.decode_error(error.error), UsageError):
                self.fallback = error.text
                return None
            raise

    def _open_grpc(self) -> GrpcChannel:
        # Import gRPC only if it is used.
        from hil.controller.devices.agent_client.grpc_stream import GrpcChannel

        with self._lock:
            self._grpc = self._grpc or GrpcChannel(self._target)
            return self._grpc
