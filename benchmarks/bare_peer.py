"""Serve as a minimal rival in a separate process: a gRPC echo of raw bytes, and a TCP socket that transfers bytes.

Prints ``{"echo": address, "tcp": port}`` and serves until stdin ends. The echo is on a Unix socket. An order over TCP
is ``<op><uint64 size>``. After ``s``, the client sends ``size`` bytes; the reply is one byte when all bytes are in
memory. The reply to ``r`` is ``size`` bytes.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import tempfile
import threading
from concurrent import futures

import grpc
import numpy as np

ORDER = struct.Struct("<cQ")


def echo_server(folder: str) -> str:
    """Serve a bidirectional stream that returns each message unchanged. Return the address."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    handler = grpc.stream_stream_rpc_method_handler(lambda messages, context: messages)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare", {"Echo": handler})])
    address = f"unix:{folder}/echo"
    server.add_insecure_port(address)
    server.start()
    globals()["keep"] = server
    return address


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill a buffer from a socket."""
    at = 0
    while at < len(view):
        got = sock.recv_into(view[at:], min(1 << 20, len(view) - at))
        if not got:
            raise ConnectionError("the peer closed the connection")
        at += got


def serve(sock: socket.socket, buffer: memoryview) -> None:
    """Execute the orders of a client."""
    head = memoryview(bytearray(ORDER.size))
    while True:
        try:
            receive_into(sock, head)
        except ConnectionError:
            return
        op, size = ORDER.unpack(head)
        if op == b"s":
            receive_into(sock, buffer[:size])
            sock.sendall(b"!")
        else:
            sock.sendall(buffer[:size])


def main() -> None:
    """Serve until stdin ends."""
    size = int(sys.argv[1])
    buffer = memoryview(np.ones(size, np.uint8).data)
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=serve, args=(sock, buffer), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"echo": echo_server(folder), "tcp": listener.getsockname()[1]}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
