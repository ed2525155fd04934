"""The calls of one agent: over data connections where it has them, and otherwise over gRPC."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from hil.controller.devices.board_client import Target
from hil.controller.devices.call import Call, CallFailed
from hil.controller.devices.data_call import OPEN_S, DataConnections, NoDataConnection
from hil.errors import UsageError
from hil.protocol import wire_errors
from hil.protocol.data_connection import data_path

if TYPE_CHECKING:
    from hil.controller.devices.grpc_call import GrpcCalls


class Calls:
    """The calls of the agent at an address. Raises as :func:`hil.controller.devices.grpc_call.agent_channel`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        is_protected = target.ca or target.cert or target.key
        path = "" if is_protected else data_path(target.address)
        self._data = DataConnections(path, target.token) if path else None
        self._grpc: GrpcCalls | None = None
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Call] = weakref.WeakSet()
        if self._data is None:
            self._over_grpc()

    def begin(self, method: str, session: str = "", *, within_s: float = OPEN_S, waits: bool = False) -> Call:
        """Begin a call: over a data connection, or where nobody takes it on there, over gRPC.

        Args:
            session: the token of the session that it belongs to; "" where it belongs to none.
            within_s: how long the agent may take to take it on.
            waits: whether a connection that is not there yet is waited for, by whoever waits for the answer.

        Raises:
            CallFailed: the agent refuses it, or hangs.
        """
        call = self._over_data(method, session, within_s) or self._over_grpc().begin(method, session, waits=waits)
        with self._lock:
            self._open.add(call)
        return call

    def is_answered(self, within_s: float) -> bool:
        """Whether an agent is at the other end, though it may be busy; one that hangs does not get so far."""
        try:
            if call := self._over_data("Clock", "", within_s):
                call.cancel()
                return True
        except CallFailed as error:
            return error.code != "DEADLINE_EXCEEDED"  # a refusal is an answer, too
        return self._over_grpc().is_answered(within_s)

    def close(self) -> None:
        """End all calls, and disconnect."""
        with self._lock:
            calls = list(self._open)
        for call in calls:
            call.cancel()
        if self._data is not None:
            self._data.close()
        if self._grpc is not None:
            self._grpc.close()

    def _over_data(self, method: str, session: str, within_s: float) -> Call | None:
        if self._data is None:
            return None
        try:
            return self._data.begin(method, session, within_s)
        except NoDataConnection:
            return None
        except CallFailed as error:
            # An agent of an older hil carries fewer methods there.
            if isinstance(wire_errors.from_bytes(error.error), UsageError):
                return None
            raise

    def _over_grpc(self) -> GrpcCalls:
        from hil.controller.devices.grpc_call import GrpcCalls  # a command that needs no gRPC does not wait for it

        with self._lock:
            self._grpc = self._grpc or GrpcCalls(self._target)
            return self._grpc
