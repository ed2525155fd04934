"""Send a request to an emulated microcontroller: `microcontroller_control.py FOLDER VERB [VALUE]`.

A board config runs this file as the flash command, without hil's packages.
"""

import json
import os
import socket
import sys


def ask(folder: str, verb: str, value: str = "", timeout_s: float = 60.0) -> object:
    """Send a request and return the answer. Raises OSError, or ValueError with the board's error."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        # Use a path through a descriptor, because socket paths must be short.
        place = os.open(folder, os.O_PATH)
        try:
            connection.connect(f"/proc/self/fd/{place}/control")
        finally:
            os.close(place)
        connection.sendall(json.dumps([verb, value]).encode() + b"\n")
        answer = json.loads(connection.makefile("rb").readline())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["answer"]


if __name__ == "__main__":
    try:
        print(ask(sys.argv[1], sys.argv[2], " ".join(sys.argv[3:])))
    except (OSError, ValueError) as error:
        sys.exit(f"the emulated board failed: {error}")
