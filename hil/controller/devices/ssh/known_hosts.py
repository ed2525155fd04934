"""The pinned keys of hosts: known_hosts files as OpenSSH writes them.

The key of an unknown host is refused or, when that was asked for, pinned; a changed one is always refused.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

from hil.errors import BoardRefused, StorageError, UsageError

_OF_THE_MACHINE = Path("/etc/ssh/ssh_known_hosts")
_REVOKED = "@revoked "


class HostKeyRefused(BoardRefused):
    """The host key is not the one that was pinned, or none was pinned yet."""


class KnownHosts(paramiko.MissingHostKeyPolicy):
    """The pinned keys of some files, and paramiko's policy for hosts that have none there.

    Args:
        accept_new: pin the key of a host that has none.
        direct: whether the host is reached without a jump, so that ``ssh-keyscan`` can ask it.

    Raises:
        UsageError: a file cannot be read.
    """

    def __init__(self, files: Sequence[Path], *, accept_new: bool, board: str, direct: bool = True) -> None:
        self._files = (*files, _OF_THE_MACHINE)
        self._accept_new = accept_new
        self._board = board
        self._direct = direct
        entries = [found for path in self._files for found in _entries(path)]
        self._revoked = {key for _, key, revoked in entries if revoked}
        self._pinned = [(name, key) for name, key, _ in entries if key not in self._revoked]

    def guard(self, client: paramiko.SSHClient) -> None:
        """Have a client check every server against these keys."""
        pinned = client.get_host_keys()
        # Of several keys of one kind paramiko keeps the last; the user's own files come first here and shall win.
        for name, key in reversed(self._pinned):
            pinned.add(name, key.get_name(), key)
        client.set_missing_host_key_policy(self)

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Pin the key of a host that has none, or refuse it (HostKeyRefused)."""
        if key in self._revoked:
            raise HostKeyRefused(f"the host key of {hostname} is revoked: {named(key)}", board=self._board)
        if self._accept_new:
            return self._pin(hostname, key)
        keyscan = f"{_keyscan(hostname, key)} >> {shlex.quote(str(self._files[0]))}, or with " if self._direct else ""
        raise HostKeyRefused(
            f"the host key of {hostname} is not known: {named(key)}",
            board=self._board,
            hint="if the board itself shows that fingerprint (ssh-keygen -lf /etc/ssh/ssh_host_..._key.pub), "
            f"pin the key with {keyscan}--accept-new-host-key",
        )

    def changed(self, name: str, shown: paramiko.PKey, pinned: paramiko.PKey) -> HostKeyRefused:
        """The error for a host that shows another key than the pinned one."""
        place = next(
            (path for path in self._files if any(key == pinned for _, key, _ in _entries(path))), "known_hosts"
        )
        return HostKeyRefused(
            f"the host key of {name} has changed: it shows {named(shown)}, pinned in {place} is {named(pinned)}",
            board=self._board,
            hint="another machine may be answering in its place. If the board was set up anew, forget the old key: "
            + shlex.join(["ssh-keygen", "-f", str(place), "-R", name]),
        )

    def _pin(self, name: str, key: paramiko.PKey) -> None:
        """Append the key in one write, so that whoever else appends at the same time loses nothing."""
        path = self._files[0]
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            open_line = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
            line = ("\n" if open_line else "") + f"{name} {key.get_name()} {key.get_base64()}\n"
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                file.write(line.encode())
                os.fsync(descriptor)
        except OSError as error:
            raise StorageError(
                f"cannot pin the host key of {name} in {path}: {error.strerror}",
                hint="name another: --known-hosts FILE",
            ) from error


def user_files() -> tuple[Path, ...]:
    """The user's own known_hosts files."""
    folder = Path.home() / ".ssh"
    return (folder / "known_hosts", folder / "known_hosts2")


def named(key: paramiko.PKey) -> str:
    """A key's kind and fingerprint, as OpenSSH shows them."""
    return f"{key.get_name()} {key.fingerprint}"


def _entries(path: Path) -> Iterator[tuple[str, paramiko.PKey, bool]]:
    """The keys in a file: (host's name, plain or hashed; key; whether it is revoked)."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"the known hosts in {path} cannot be read: {error.strerror}") from error
    for line in lines:
        text = " ".join(line.split())
        plain = text.removeprefix(_REVOKED)
        # Certificate authorities, the other mark, vouch for no plain key.
        if not text or text.startswith("#") or plain.startswith("@"):
            continue
        try:
            entry = HostKeyEntry.from_line(plain)
        except (paramiko.SSHException, InvalidHostKey, ValueError):
            # A line that cannot be read pins nothing: its host is unknown and therefore refused.
            continue
        if entry and entry.key and entry.hostnames:
            yield from ((name, entry.key, plain != text) for name in entry.hostnames)


def _keyscan(name: str, key: paramiko.PKey) -> str:
    host, _, port = name.removeprefix("[").partition("]:")
    kind = key.get_name().removeprefix("ssh-").partition("-")[0]
    return shlex.join(["ssh-keyscan", *(["-p", port] if port else []), "-t", kind, host])
