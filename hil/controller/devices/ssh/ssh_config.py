"""The user's ssh config: ``~/.ssh/config`` and ``/etc/ssh/ssh_config``, with ``Include``, which paramiko leaves out."""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.devices.ssh.address import Address, parse_address
from hil.errors import UsageError

if TYPE_CHECKING:
    import paramiko

_SYSTEM = Path("/etc/ssh")
_DEEPEST = 16


@dataclass(frozen=True)
class HostSettings:
    """What the ssh config says about a host.

    Attributes:
        identities: private keys, in the order to try.
        only_identities: whether keys of the agent that are not among them are left out.
        known_hosts: files of pinned host keys; empty leaves it to the usual ones.
        jumps: the machines on the way, the nearest first.
        proxy_command: the command that leads there in place of a TCP connection, or "".
    """

    identities: tuple[Path, ...] = ()
    only_identities: bool = False
    known_hosts: tuple[Path, ...] = ()
    jumps: tuple[Address, ...] = ()
    proxy_command: str = ""


def read_ssh_config(address: Address | None = None) -> paramiko.SSHConfig:
    """Both files, the user's first; before them what an address says itself, so that a ProxyCommand has it, too.

    Raises:
        UsageError: one cannot be read or understood.
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
    """What the config says about a host, by the name that the user calls it.

    Raises:
        UsageError: it says something that makes no sense.
    """
    import paramiko

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
    """The machines to log in to, one through the other, up to the address itself.

    Raises:
        UsageError: the jumps of the ssh config go in a circle.
    """
    if address.host in passed:
        raise UsageError(f"the ssh config reaches {address.host} through itself", hint="look at its ProxyJump")
    jumps = settings_for(config, address.host).jumps
    if not jumps:
        return (address,)
    return (*route(config, jumps[0], (*passed, address.host)), *jumps[1:], address)
