"""SSH addresses as a user writes them, what the user's ssh config says of them, and pinned host keys.

An address is ``USER@HOST``, ``USER@HOST:PORT``, ``ssh:HOST`` or ``ssh://USER@[::1]:22``. The config is
``~/.ssh/config`` and ``/etc/ssh/ssh_config``, with ``Include``, which paramiko leaves out. known_hosts files are as
OpenSSH writes them: the key of an unknown host is refused or, when that was asked for, pinned; paramiko always refuses
a changed one.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

from hil.errors import BoardRefused, StorageError, UsageError

SSH_PORT = 22
# As OpenSSH does it, no user's name may hold what a shell reads: the ssh config may hand it to one.
_ADDRESS = re.compile(
    r"(?:ssh:(?://)?)?"
    r"(?:(?P<user>[^-\s:/\[\]'\"`;&<>|(){}\\][^\s:/\[\]'\"`;&<>|(){}]*)@)?"
    r"(?:\[(?P<bracketed>[0-9a-fA-F:.]+(?:%[\w.]+)?)\]|(?P<bare6>[0-9a-fA-F]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*(?:%[\w.]+)?)"
    r"|(?P<host>[\w][\w.-]*))"
    r"(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True)
class Address:
    """Where an SSH server is."""

    host: str  # a name of the ssh config, a host's name, or an IP address
    user: str = ""  # who logs in; "" leaves it to the ssh config
    port: int = 0  # TCP port; 0 leaves it to the ssh config

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        if self.port in (0, SSH_PORT):
            return user + self.host
        return f"{user}[{self.host}]:{self.port}" if ":" in self.host else f"{user}{self.host}:{self.port}"


def is_ssh_address(text: str) -> bool:
    """Whether a text of ``--board`` is an address for SSH: one with a user, or one that begins with ``ssh:``."""
    return text.startswith("ssh:") or ("@" in text and _ADDRESS.fullmatch(text) is not None)


def parse_address(text: str) -> Address:
    """The address in a text; the user, the port and ``ssh:`` may be left out. Raises UsageError: it is none."""
    found = _ADDRESS.fullmatch(text)
    port = int(found["port"]) if found and found["port"] else 0
    if not found or not 0 <= port < 65536 or found["port"] == "0":
        raise UsageError(f"{text!r} is no address for SSH", hint="USER@HOST, USER@HOST:PORT or ssh:HOST")
    return Address(found["host"] or found["bracketed"] or found["bare6"], found["user"] or "", port)


_SYSTEM = Path("/etc/ssh")
_DEEPEST = 16


@dataclass(frozen=True)
class HostSettings:
    """What the ssh config says about a host."""

    identities: tuple[Path, ...] = ()
    only_identities: bool = False  # whether keys of the agent that are not among them are left out
    known_hosts: tuple[Path, ...] = ()  # files of pinned host keys; empty leaves it to the usual ones
    jumps: tuple[Address, ...] = ()  # the machines on the way, the nearest first
    proxy_command: str = ""  # the command that leads there in place of a TCP connection, or ""


def read_ssh_config(address: Address | None = None) -> paramiko.SSHConfig:
    """Both files, the user's first; before them what an address says itself, so that a ProxyCommand has it, too.

    Raises UsageError where one cannot be read or understood.
    """
    config = paramiko.SSHConfig()
    if address:
        given = {"User": address.user, "Port": str(address.port or "")}
        config.parse([f"Host {address.host}", *(f"{key} {value}" for key, value in given.items() if value)])
    user = Path.home() / ".ssh"
    for path, folder in ((user / "config", user), (_SYSTEM / "ssh_config", _SYSTEM)):
        try:
            if path.is_file():
                config.parse(_lines(path, folder, ["Host *"]))
        except (paramiko.ConfigParseError, OSError, ValueError, RuntimeError) as error:
            raise UsageError(f"cannot read {path}: {error}", hint="`ssh -G HOST` tells what is wrong") from error
    return config


def _lines(path: Path, folder: Path, block: list[str], depth: int = 0) -> Iterator[str]:
    """A config's lines with the files in it that it includes; each goes on in the block it was included in."""
    if depth > _DEEPEST:
        raise RecursionError(f"{path} is included too deeply")
    for line in path.read_text().splitlines():
        keyword, rest = (*re.split(r"\s*=\s*|\s+", line.strip(), maxsplit=1), "")[:2]
        if keyword.lower() in ("host", "match"):
            block[:] = [line]
        if keyword.lower() != "include":
            yield line
            continue
        for pattern in shlex.split(rest):
            for name in sorted(glob.glob(str(folder / Path(pattern).expanduser()))):  # noqa: PTH207 (absolute patterns)
                yield block[0]
                yield from _lines(Path(name), folder, list(block), depth + 1)
        yield block[0]


def settings_for(config: paramiko.SSHConfig, host: str) -> HostSettings:
    """What the config says about a host, by the name that the user calls it; UsageError where that makes no sense."""
    try:
        return _settings(config, host)
    except (paramiko.SSHException, ValueError, RuntimeError) as error:  # RuntimeError: ~USER of nobody
        raise UsageError(
            f"the ssh config for {host} is wrong: {error}", hint="`ssh -G HOST` tells what is wrong"
        ) from error


def _settings(config: paramiko.SSHConfig, host: str) -> HostSettings:
    found = config.lookup(host)
    jump = found.get("proxyjump", "none")
    jumps = () if jump.lower() == "none" else tuple(parse_address(hop.strip()) for hop in jump.split(","))
    # A pattern that holds for the jump as well leads nobody through itself.
    jumps = () if any(hop.host == host for hop in jumps) else jumps
    files = shlex.split(found.get("userknownhostsfile", ""))
    return HostSettings(
        identities=tuple(Path(name).expanduser() for name in found.get("identityfile", ()) if name != "none"),
        only_identities=found.get("identitiesonly", "no").lower() in ("yes", "true"),
        known_hosts=tuple(Path(name.replace("%d", "~")).expanduser() for name in files),
        jumps=jumps,
        proxy_command="" if jumps else found.get("proxycommand") or "",
    )


def route(config: paramiko.SSHConfig, address: Address, passed: tuple[str, ...] = ()) -> tuple[Address, ...]:
    """The machines to log in to, one through the other, up to the address itself; UsageError for a circle."""
    if address.host in passed:
        raise UsageError(f"the ssh config reaches {address.host} through itself", hint="look at its ProxyJump")
    jumps = settings_for(config, address.host).jumps
    if not jumps:
        return (address,)
    return (*route(config, jumps[0], (*passed, address.host)), *jumps[1:], address)


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


def name_of(host: str, port: int) -> str:
    """How known_hosts files call a server."""
    return host if port == SSH_PORT else f"[{host}]:{port}"


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
