"""Pinned host keys for paramiko, in OpenSSH's known_hosts format.

The key of an unknown host is refused or, if requested, pinned. A changed key is always refused.
"""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeys
from paramiko.pkey import UnknownKeyType

from hil.controller.devices.ssh.errors import HostKeyRefused
from hil.controller.devices.ssh.paramiko.config import NO_SSH_HINT, match_patterns
from hil.core.files import read_end, read_text
from hil.errors import StorageError, UsageError

_OF_THE_MACHINE = (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))
_REVOKED, _AUTHORITY = "@revoked", "@cert-authority"
# Signature algorithms of an RSA host key.
_RSA = ("rsa-sha2-512", "rsa-sha2-256")


@dataclass(frozen=True)
class _Line:
    """Key in a known_hosts file."""

    file: Path
    number: int
    marker: str  # "@revoked", "@cert-authority" or ""
    hosts: str  # patterns, or a single hashed name
    key: paramiko.PKey

    def is_for(self, name: str) -> bool:
        """Return whether the line applies to a server. ``name`` has the form that known_hosts files use."""
        if self.hosts.startswith("|1|"):
            try:
                return HostKeys.hash_host(name, self.hosts) == self.hosts
            except (ValueError, IndexError, AssertionError):  # invalid salt length
                return False
        return match_patterns(self.hosts.lower().split(","), name.lower())


class KnownHosts(paramiko.MissingHostKeyPolicy):
    """Pinned keys of known_hosts files, and paramiko's policy that checks every server.

    Args:
        files: The user's files. New keys are written to the first file.
        accept_new: Whether to pin the key of an unknown host.
        expected: Required fingerprint of the host key, which is pinned; "" for any pinned key.
        direct: Whether the host is reached without a jump host, so that ``ssh-keyscan`` can query it.

    Raises:
        UsageError: A file cannot be read.
    """

    def __init__(
        self, files: Sequence[Path], *, accept_new: bool, board: str, direct: bool = True, expected: str = ""
    ) -> None:
        self._files = files
        self._accept_new = accept_new or bool(expected)
        self._expected = expected
        self._board = board
        self._direct = direct
        self._lines = [line for path in (*files, *_OF_THE_MACHINE) for line in _read_lines(path)]

    def list_preferred_kinds(self, name: str) -> list[str]:
        """Return the algorithms of a server's pinned keys, for the negotiation."""
        kinds = dict.fromkeys(line.key.get_name() for line in self._lines if not line.marker and line.is_for(name))
        return [algorithm for kind in kinds for algorithm in (_RSA if kind == "ssh-rsa" else (kind,))]

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Check a server's key as OpenSSH does. Pin a new key if ``accept_new`` is set.

        Raises:
            HostKeyRefused: The key is unknown, changed or revoked.
            UsageError: The check needs a host certificate, which hil does not support.
        """
        if self._expected not in ("", key.fingerprint):
            raise HostKeyRefused(
                f"the host key of {hostname} is {_describe(key)}, expected {self._expected}",
                board=self._board,
                hint="a different machine may be using the address; or use the fingerprint of the key of this type: "
                "ssh-keygen -lf /etc/ssh/ssh_host_..._key.pub on the board",
            )
        for name in _list_names(hostname):
            found = [line for line in self._lines if line.is_for(name)]
            if any(line.marker == _REVOKED and line.key == key for line in found):
                raise HostKeyRefused(f"the host key of {hostname} is revoked: {_describe(key)}", board=self._board)
            pinned = [line for line in found if not line.marker]
            if any(line.key == key for line in pinned):
                return
            for line in found:
                if line.marker == _AUTHORITY:
                    what = f"host certificates are unsupported without ssh, and {hostname} may have one"
                    raise UsageError(f"{line.file}, line {line.number}: {what}", hint=NO_SSH_HINT)
            if pinned and name == hostname:
                raise self._make_changed_error(hostname, key, pinned[0])
        if self._accept_new:
            return self._pin(hostname, key)
        place = shlex.quote(str(self._files[0] if self._files else _OF_THE_MACHINE[0]))
        keyscan = f"{_build_keyscan(hostname, key)} >> {place}, or with " if self._direct else ""
        raise HostKeyRefused(
            f"unknown host key of {hostname}: {_describe(key)}",
            board=self._board,
            hint="compare the fingerprint with the output of `ssh-keygen -lf /etc/ssh/ssh_host_..._key.pub` on the "
            f"board; if both match, pin the key with {keyscan}--accept-new-host-key",
        )

    def _make_changed_error(self, name: str, shown: paramiko.PKey, pinned: _Line) -> HostKeyRefused:
        return HostKeyRefused(
            f"the host key of {name} has changed: it shows {_describe(shown)}, "
            f"pinned in {pinned.file} is {_describe(pinned.key)}",
            board=self._board,
            hint="a different machine may be using the address; if the board was reinstalled, remove the old key: "
            + shlex.join(["ssh-keygen", "-f", str(pinned.file), "-R", name]),
        )

    def _pin(self, name: str, key: paramiko.PKey) -> None:
        """Append the key in a single write, so that concurrent writers lose no data."""
        if not self._files:
            raise UsageError(
                f"missing known-hosts file for the host key of {name}", hint="set a file with --known-hosts FILE"
            )
        path = self._files[0]
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            open_line = path.is_file() and read_end(path, 1) not in ("", "\n")
            line = ("\n" if open_line else "") + f"{name} {key.get_name()} {key.get_base64()}\n"
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                file.write(line.encode())
        except OSError as error:
            raise StorageError(
                f"cannot pin the host key of {name} in {path}: {error.strerror}",
                hint="set a different file: --known-hosts FILE",
            ) from error


def list_user_files() -> tuple[Path, ...]:
    """Return the user's known_hosts files."""
    folder = Path.home() / ".ssh"
    return (folder / "known_hosts", folder / "known_hosts2")


def _list_names(name: str) -> tuple[str, ...]:
    """Return the names to search for a server's keys. Like OpenSSH, also try the name without a port."""
    host, separator, _ = name.removeprefix("[").partition("]:")
    return (name, host) if separator else (name,)


def _describe(key: paramiko.PKey) -> str:
    """Return a key's type and fingerprint in OpenSSH's format."""
    return f"{key.get_name()} {key.fingerprint}"


def _read_lines(path: Path) -> Iterator[_Line]:
    """Yield the keys of a file. Like ssh, ignore invalid lines and unsupported key types."""
    # Users often set this file to disable pinned keys.
    if path == Path(os.devnull):
        return
    try:
        # Comments may have any encoding.
        lines = read_text(path, errors="replace").split("\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot read the known hosts in {path}: {error.strerror}") from error
    for number, text in enumerate(lines, 1):
        words = text.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if marker not in ("", _REVOKED, _AUTHORITY) or len(words) < 3 or words[0].startswith("#"):
            continue
        try:
            key = paramiko.PKey.from_type_string(words[1], base64.b64decode(words[2]))
        except (paramiko.SSHException, UnknownKeyType, ValueError):
            continue
        yield _Line(path, number, marker, words[0], key)


def _build_keyscan(name: str, key: paramiko.PKey) -> str:
    host, _, port = name.removeprefix("[").partition("]:")
    kind = key.get_name().removeprefix("ssh-").partition("-")[0]
    return shlex.join(["ssh-keyscan", *(["-p", port] if port else []), "-t", kind, host])
