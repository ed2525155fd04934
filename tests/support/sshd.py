"""A real sshd on loopback with its own keys, and a relay in front of it whose connection can be interrupted.

It is the sshd of this machine or, if none is installed, of Debian, unpacked into the cache. As root, sshd needs a user
`sshd` and a directory /run/sshd. A separate mount namespace contains both.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hil.core.board_config import Connection
from support.debian import program
from support.waiting import eventually
from tools.virtual_board.places import make_private

LOOPBACK = "127.0.0.1"
# Arguments for parametrize with `indirect`, for tests of both clients.
BOTH = ("client", ["OpenSSH", pytest.param("paramiko", marks=pytest.mark.ci)])
IS_ROOT = os.geteuid() == 0
# User who logs in with a password, if sshd runs as root. `openssl passwd -6 -salt boardboard over-the-wire`
PASSWORD_USER, PASSWORD = "somebody", "over-the-wire"
_HASH = "$6$boardboard$ppfEfSpZIZyV6WMISJk3zkge.CkQKr9cIjQlqT1KIOjWqBZMCXcFS1EigufK8Vb7Grrin79QrUJ4uIXn1oay/0"
# Log message of an sshd that accepts connections.
_LISTENS = "Server listening on"
_SETTINGS = """
StrictModes no
UsePAM no
PidFile none
PrintMotd no
LogLevel VERBOSE
MaxStartups 100
PermitRootLogin yes
PasswordAuthentication yes
"""


def free_port() -> int:
    """Return a port that no process uses, below the range from which the system selects free ports."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


def make_key(path: Path, *, passphrase: str = "", kind: str = "ed25519") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", path], check=True)
    return path


@dataclass
class Sshd:
    """Running sshd. Tests can add settings and restart it.

    ``shell`` is the login shell of root. As root, ``mounts`` are commands that run in its mount namespace, and
    ``prefix``
    is the start of its command line, such as nsenter and its options.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    listen: str = LOOPBACK
    shell: str = "/bin/sh"
    mounts: str = ""
    prefix: tuple[str, ...] = ()
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.home = make_private(self.folder / "home")
        self.identity = make_key(self.folder / "id")
        self.host_key = make_key(self.folder / "host_key")
        self.authorized = self.folder / "authorized_keys"
        self.authorize(self.identity)
        self.known_hosts = self.folder / "known_hosts"
        self.pin(self.known_hosts)

    @property
    def user(self) -> str:
        return getpass.getuser()

    @property
    def address(self) -> str:
        return f"{self.user}@{LOOPBACK}:{self.port}"

    @property
    def connection(self) -> Connection:
        return Connection(identity=str(self.identity), known_hosts=str(self.known_hosts))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def end_agents(self) -> None:
        """Stop the agents that hil deployed to this server. Otherwise they run until their idle timeout."""
        for pid in started_with(f"HOME={self.home}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def authorize(self, identity: Path) -> None:
        with self.authorized.open("a") as file:
            file.write(identity.with_name(f"{identity.name}.pub").read_text())

    def pin(self, known_hosts: Path, port: int = 0, key: Path | None = None) -> None:
        """Store the host key of this server or of another server in known_hosts."""
        public = (key or self.host_key).with_suffix(".pub").read_text()
        with known_hosts.open("a") as file:
            file.write(f"[{LOOPBACK}]:{port or self.port} {public}")

    def start(self, *settings: str) -> None:
        sshd, environment = program("sshd", "openssh-server", "usr/sbin/sshd")
        config = self.folder / "sshd_config"
        lines = [
            f"Port {self.port}",
            f"ListenAddress {self.listen}",
            f"HostKey {self.host_key}",
            f"AuthorizedKeysFile {self.authorized}",
            f"SetEnv HOME={self.home}",
        ]
        config.write_text("\n".join([*settings, *lines]) + _SETTINGS)
        command = [str(sshd), "-D", "-e", "-f", str(config)]
        if IS_ROOT:
            command = [*self.prefix, "unshare", "--mount", "sh", "-ec", self._namespace(), "sh", *command]
        with (self.folder / "log").open("ab") as log:
            before = self.log.count(_LISTENS)
            self._process = subprocess.Popen(
                command, env={**os.environ, **environment}, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        eventually(lambda: self.log.count(_LISTENS) > before or self._process.poll() is not None)
        assert self._process.poll() is None, self.log

    def stop(self) -> None:
        """Stop sshd and all its connections."""
        if self._process:
            for pid in [*descendants(self._process.pid), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _namespace(self) -> str:
        passwd = self.folder / "passwd"
        lines = Path("/etc/passwd").read_text().splitlines()
        kept = [line for line in lines if line.split(":")[0] not in ("root", "sshd", PASSWORD_USER)]
        kept += [
            f"root:x:0:0:root:{self.home}:{self.shell}",
            "sshd:x:74:65534::/run/sshd:/usr/sbin/nologin",
            f"{PASSWORD_USER}:{_HASH}:12345:12345::{self.home}:/bin/sh",
        ]
        passwd.write_text("\n".join(kept) + "\n")
        return (
            f"mount --make-rprivate /; mount --bind '{passwd}' /etc/passwd; "
            f"mount -t tmpfs -o mode=755,size=4m tmpfs /run; mkdir /run/sshd; {self.mounts or ':'}; "
            'exec "$@"'
        )


@contextlib.contextmanager
def running_sshd(folder: Path, *settings: str, **fields: Any) -> Iterator[Sshd]:
    """sshd with these settings. ``fields`` are fields of :class:`Sshd`."""
    server = Sshd(make_private(folder), **fields)
    try:
        server.start(*settings)
        yield server
    finally:
        server.stop()
        server.end_agents()


class Relay:
    """Relay of TCP connections through this process. During a cut, no data passes, and both ends notice nothing."""

    def __init__(self, port: int, turn_away: int = 0) -> None:
        self._to = port
        self._turn_away = turn_away
        self._left: int | None = None
        self.came = 0
        self._passing = threading.Event()
        self._passing.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._passing.clear()

    def cut_after(self, size: int) -> None:
        """Cut the connection after this number of further bytes."""
        self._left = size

    def restore(self) -> None:
        self._left = None
        self._passing.set()

    def close(self) -> None:
        self._passing.set()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.came += 1
                if self.came <= self._turn_away:
                    near.close()
                    continue
                far = socket.create_connection((LOOPBACK, self._to))
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if self._left is not None:
                    self._left -= len(piece)
                    if self._left < 0:
                        self._passing.clear()
                self._passing.wait()
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_RDWR)


def started_with(setting: str) -> list[int]:
    """Return the processes with ``NAME=VALUE`` in their environment. Ended processes have no readable environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if setting.encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, from the current content of /proc."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = list(parents.get(pid, []))
    for child in found:
        found += parents.get(child, [])
    return found
