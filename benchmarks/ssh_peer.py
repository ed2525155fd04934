"""Transfer bytes over a Unix socket on a board for one client, like ``bare_peer.py`` over TCP.

Started as ``python3 - PATH SIZE`` with this file on stdin, because the board has no packages.
"""

import socket
import struct
import sys
from pathlib import Path

ORDER = struct.Struct("<cQ")


def main() -> None:
    """Serve one client until it disconnects."""
    path, size = sys.argv[1], int(sys.argv[2])
    buffer = memoryview(bytearray(b"x" * size))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready")
        client, _ = listener.accept()
    Path(path).unlink()
    while head := client.recv(ORDER.size, socket.MSG_WAITALL):
        op, count = ORDER.unpack(head)
        if op == b"s":
            at = 0
            while at < count:
                at += client.recv_into(buffer[at:], min(1 << 20, count - at))
            client.sendall(b"!")
        else:
            client.sendall(buffer[:count])


main()
