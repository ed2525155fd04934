"""An interactive lease on its board's host: connections of its holder that come through the farm, led to the agent's
guard.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import grpc

from hil.controller.devices.links.link import Say
from hil.controller.farm.client import FarmClient, open_channel
from hil.controller.farm.stubs import DIAL_KEY, FarmStub
from hil.controller.farm.tunnel_client import pass_on, pieces_from
from hil.errors import HilError
from hil.protocol import wire
from hil.protocol.v1 import farm_pb2 as pb


class Serving:
    """The connections of one lease, until it is over.

    Args:
        lease: its number.
        address: where the holder's calls are served: ``unix:PATH``.
        say: told of connections that could not be made.
    """

    def __init__(self, lease: int, address: str, say: Say) -> None:
        self.lease, self.address, self._say = lease, address, say
        self._lock = threading.Lock()
        self._open: dict[socket.socket, Any] = {}
        self._over = False

    def dialled(self, dial: pb.DialIn, client: FarmClient) -> None:
        """The holder wants a connection: it is made and carried by a thread of its own."""
        threading.Thread(target=self._carry, args=(dial, client), daemon=True, name="farm-dial").start()

    def close(self) -> None:
        """The lease is over: end all of them, and make no more."""
        with self._lock:
            self._over = True
            carried = list(self._open.items())
        for near, far in carried:
            far.cancel()
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)

    def _carry(self, dial: pb.DialIn, client: FarmClient) -> None:
        metadata = [*client.metadata, (DIAL_KEY, dial.id)]
        # Not the client's own: that ends with the stream on which the board is attended.
        try:
            channel = open_channel(dial.gateway or client.gateway, client.address.ca)
        except HilError as error:
            return self._say(f"a connection of lease {self.lease} could not be carried: {error}")
        try:
            with socket.socket(socket.AF_UNIX) as near:
                near.connect(self.address.removeprefix("unix:"))
                far = FarmStub(channel).Accept(pieces_from(near), metadata=metadata)
                with self._lock:
                    self._open[near] = far
                    if self._over:
                        far.cancel()
                try:
                    pass_on(far, near)
                finally:
                    with self._lock:
                        del self._open[near]
        except (OSError, HilError) as error:
            self._say(f"a connection of lease {self.lease} could not be carried: {error}")
        except grpc.RpcError:
            pass  # the holder, or the gateway, hung up
        finally:
            wire.close_channel(channel)
