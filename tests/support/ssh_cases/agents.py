"""Real ssh agents, and an ssh agent in this process that misbehaves as chosen."""

from __future__ import annotations

import base64
import contextlib
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from support.waiting import eventually

FAILURE, REQUEST_IDENTITIES, IDENTITIES, SIGN = 5, 11, 12, 13


def make_security_key() -> tuple[bytes, str]:
    """Return a public key of a FIDO token that does not exist, in the formats of ssh agents and of authorized_keys."""
    kind = "sk-ssh-ed25519@openssh.com"
    blob = b"".join(map(string, (kind.encode(), bytes(range(32)), b"ssh:")))
    return blob, f"{kind} {base64.b64encode(blob).decode()} token\n"


def string(data: bytes) -> bytes:
    """Encode a string of the SSH protocols."""
    return struct.pack(">I", len(data)) + data


@contextlib.contextmanager
def real_agent(folder: Path, **environment: str) -> Iterator[Path]:
    """Start an ssh agent. Return the path of its socket."""
    path = folder / "agent.sock"
    command = ["ssh-agent", "-D", "-a", str(path)]
    env = {"PATH": "/usr/bin:/bin", **environment}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        eventually(lambda: accepts_connections(path), process=process)
        yield path
    finally:
        process.terminate()
        process.wait()


def accepts_connections(path: Path) -> bool:
    """Return whether a process listens on a Unix socket. The socket exists before the process listens."""
    with socket.socket(socket.AF_UNIX) as link:
        return link.connect_ex(str(path)) == 0


def add_key(agent: Path, *arguments: str | Path, **environment: str) -> None:
    """Run ssh-add with these arguments."""
    env = {"PATH": "/usr/bin:/bin", "SSH_AUTH_SOCK": str(agent), **environment}
    subprocess.run(["ssh-add", "-q", *arguments], check=True, env=env, stdin=subprocess.DEVNULL)


def ask(path: Path, request: bytes) -> bytes:
    """Return the reply of a real agent to a request."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        link.sendall(string(request))
        return _message(link)


def _message(link: socket.socket) -> bytes:
    head = link.recv(4, socket.MSG_WAITALL)
    return link.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL) if len(head) == 4 else b""


class FakeAgent:
    """Agent whose replies are from a function: bytes, None to hang, or b"" to close the connection."""

    def __init__(self, path: Path, answer: Callable[[bytes], bytes | None]) -> None:
        self.path = path
        self._answer = answer
        self._links: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close the connection."""
        for one in (self._listener, *self._links):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link = self._listener.accept()[0]
                self._links.append(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while request := _message(link):
                answer = self._answer(request)
                if answer is None:
                    continue
                if not answer:
                    break
                link.sendall(string(answer))
            link.close()


@contextlib.contextmanager
def fake_agent(path: Path, answer: Callable[[bytes], bytes | None]) -> Iterator[Path]:
    """Start a fake agent. Return the path of its socket."""
    agent = FakeAgent(path, answer)
    try:
        yield path
    finally:
        agent.close()


def before(real: Path, keys: Sequence[bytes], comment: bytes = b"fake") -> Callable[[bytes], bytes]:
    """Reply as a real agent with additional keys before its own keys. It cannot sign with the additional keys."""

    def answer(request: bytes) -> bytes:
        if request[0] == SIGN and any(string(key) == request[1 : 5 + len(key)] for key in keys):
            return bytes([FAILURE])
        reply = ask(real, request)
        if request[0] != REQUEST_IDENTITIES:
            return reply
        count = struct.unpack(">I", reply[1:5])[0] + len(keys)
        more = b"".join(string(key) + string(comment) for key in keys)
        return bytes([IDENTITIES]) + struct.pack(">I", count) + more + reply[5:]

    return answer
