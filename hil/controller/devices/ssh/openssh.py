"""OpenSSH's own client, sent to exactly the machines that a shell of ours is logged in to.

It reads an ssh config of ours and nothing else: the same hosts, ports and jumps, the key that let us in, and as known
hosts only the keys that these machines have shown us.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from hil.controller.devices.ssh.transport import ASK_EVERY_S, AgentKey, FileKey, Hop
from hil.core.scratch import new_folder

#: What the config calls the board.
BOARD = "board"
# A Unix socket's path has room for 104 bytes on macOS.
_LONGEST_FOLDER = 60
_FORBIDDEN = set('"\n\\')
_COMMON = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "GlobalKnownHostsFile": "/dev/null",
    "UpdateHostKeys": "no",
    "IdentitiesOnly": "yes",
    "PreferredAuthentications": "publickey",
    # The ciphers that machines do in hardware; no key exchange that takes a small board's processor 250 ms.
    "Ciphers": "aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr,aes256-ctr",
    "KexAlgorithms": "-sntrup761x25519-sha512*",
    "Compression": "no",
    "ConnectTimeout": "10",
    "ServerAliveInterval": f"{ASK_EVERY_S:g}",
    "ServerAliveCountMax": "3",
    "ControlPath": "none",
    "ExitOnForwardFailure": "yes",
    "StreamLocalBindUnlink": "yes",
    # It tells of sockets that are not there.
    "LogLevel": "INFO",
}


def can_log_in(hops: Sequence[Hop]) -> bool:
    """Whether there is an ssh, and it can use what let us in: a key without a passphrase that others cannot read."""
    return shutil.which("ssh") is not None and all(map(_is_usable, hops))


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for sockets and for what an ssh reads, for nobody else to see; gone at the end."""
    folder = new_folder("hil-ssh-", for_sockets=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command(hops: Sequence[Hop], folder: Path) -> list[str]:
    """The beginning of an ssh command line; options and :data:`BOARD` follow. Its files are written to the folder."""
    lines: list[str] = []
    known: list[str] = []
    names = [*(f"jump{number}" for number in range(1, len(hops))), BOARD]
    for number, (name, hop) in enumerate(zip(names, hops, strict=True)):
        key = hop.host_key
        known.append(f"{name} {key.get_name()} {key.get_base64()}\n")
        settings = {
            "HostName": _plain(hop.connection.host),
            "Port": str(hop.connection.port),
            "User": hop.connection.user,
            "HostKeyAlias": name,
            **_identity(hop, folder / f"{name}.pub"),
        }
        if number:
            settings["ProxyJump"] = names[number - 1]
        elif hop.proxy_command:
            settings["ProxyCommand"] = _plain(hop.proxy_command)
        lines += [f"Host {name}", *(f"  {keyword} {value}" for keyword, value in settings.items())]
    lines += ["Host *", *(f"  {keyword} {value}" for keyword, value in _COMMON.items())]
    lines.append(f'  UserKnownHostsFile "{folder}/known_hosts"')
    (folder / "known_hosts").write_text("".join(known))
    (folder / "config").write_text("\n".join(lines) + "\n")
    return ["ssh", "-F", str(folder / "config")]


def _is_usable(hop: Hop) -> bool:
    if _FORBIDDEN & set(f"{hop.connection.host}{hop.connection.user}"):
        return False
    source = hop.source
    return isinstance(source, AgentKey) or (
        isinstance(source, FileKey) and source.plain and not _FORBIDDEN & set(str(source.path))
    )


def _identity(hop: Hop, public: Path) -> dict[str, str]:
    """The key that let us in: its file, or for one of the agent its public part, by which ssh finds it there."""
    if isinstance(hop.source, FileKey):
        return {"IdentityFile": f'"{_plain(str(Path(hop.source.path).absolute()))}"', "IdentityAgent": "none"}
    assert isinstance(hop.source, AgentKey)
    key = hop.source.pkey
    public.write_text(f"{key.get_name()} {key.get_base64()}\n")
    return {"IdentityFile": f'"{_plain(str(public))}"', "IdentityAgent": f'"{_plain(os.environ["SSH_AUTH_SOCK"])}"'}


def _plain(text: str) -> str:
    """A text in which ssh expands nothing."""
    return text.replace("%", "%%")
