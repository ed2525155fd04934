"""Program that ``ssh`` runs to ask for a secret. The program passes the prompt to hil and prints the answer.

The program uses only the standard library. ``HIL_ASKPASS_SOCKET`` is the path of hil's socket.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys


def main() -> int:
    """Ask for the secret. Return exit code 1 without an answer."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ["HIL_ASKPASS_SOCKET"])
        kind = os.environ.get("SSH_ASKPASS_PROMPT", "")
        question = {"prompt": " ".join(sys.argv[1:]), "kind": kind, "ssh": os.getppid()}
        link.sendall(json.dumps(question).encode() + b"\n")
        # A notice gets no answer: ssh ends this process after the notice.
        answer = json.loads(link.makefile("rb").readline() or b"null")
    if answer is None:
        return 1
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    print(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
