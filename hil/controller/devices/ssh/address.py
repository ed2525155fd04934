"""SSH addresses as a user writes them, and what the user's ssh config says of them.

An address is ``USER@HOST``, ``USER@HOST:PORT``, ``ssh:HOST`` or ``ssh://USER@[::1]:22``. The config is
``~/.ssh/config`` and ``/etc/ssh/ssh_config``, with ``Include``, which paramiko leaves out.
"""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hil.errors import UsageError

if TYPE_CHECKING:
    import paramiko

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
    import paramiko

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
    import paramiko

    try:
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
    except (paramiko.SSHException, ValueError, RuntimeError) as error:  # RuntimeError: ~USER of nobody
        what = f"the ssh config for {host} is wrong: {error}"
        raise UsageError(what, hint="`ssh -G HOST` tells what is wrong") from error


def route(config: paramiko.SSHConfig, address: Address, passed: tuple[str, ...] = ()) -> tuple[Address, ...]:
    """The machines to log in to, one through the other, up to the address itself; UsageError for a circle."""
    if address.host in passed:
        raise UsageError(f"the ssh config reaches {address.host} through itself", hint="look at its ProxyJump")
    jumps = settings_for(config, address.host).jumps
    if not jumps:
        return (address,)
    return (*route(config, jumps[0], (*passed, address.host)), *jumps[1:], address)


def name_of(host: str, port: int) -> str:
    """How known_hosts files call a server."""
    return host if port == SSH_PORT else f"[{host}]:{port}"
