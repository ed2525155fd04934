"""A user with a home directory, as both `ssh` and `hil` see it.

`ssh` takes the home directory from passwd and ignores $HOME. So both run in a mount namespace whose passwd names a
temporary directory: a symbolic link, which leads to the home of the current test.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.command_server import CommandServer
from support.sshd import LOOPBACK, Sshd

TIMEOUT_S = 60.0
REACHED = re.compile(r"^(?:SSH_CONNECTION=)?(\S+) \d+ (\S+) (\d+)\r?$", re.M)


@dataclass(frozen=True)
class Ended:
    """Result of a program. ``code`` is None after a timeout."""

    code: int | None
    out: str
    err: str

    @property
    def reached(self) -> tuple[str, str, int] | None:
        """Return the client's address, the server's address and the server's port of a login; None without a login."""
        found = REACHED.search(self.out)
        return (found[1], found[2], int(found[3])) if found and self.code == 0 else None

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}{self.err}"


OPENSSH, PARAMIKO = "openssh", "paramiko"
# Arguments for parametrize with `indirect`, for tests of both transports.
BOTH = ("transport", [OPENSSH, pytest.param(PARAMIKO, marks=pytest.mark.slow)])
# Without `ssh` on PATH, hil uses paramiko.
_PATH_WITHOUT_SSH = "/usr/sbin"


@dataclass(frozen=True)
class Both:
    """Results of `ssh` and `hil` with the same files.

    paramiko supports only some of these files: it may reject a file as invalid usage, and its messages differ.
    """

    ssh: Ended
    hil: Ended
    transport: str

    def assert_logged_in(self) -> None:
        """Assert that both logged in to the same server, from the same address."""
        assert self.ssh.reached, f"ssh: {self.ssh}"
        if not self._is_rejected:
            assert self.hil.reached == self.ssh.reached, f"ssh: {self.ssh.reached}\nhil: {self.hil}"

    def assert_refused(self, *texts: str, code: int = 4) -> None:
        """Assert that both failed for the reason that ssh gives in these texts."""
        assert self.ssh.code == 255, f"ssh: {self.ssh}"
        if self.transport == PARAMIKO:
            assert self._is_rejected or self.hil.code == 4, f"hil: {self.hil}"
            return
        assert self.hil.code == code, f"hil: {self.hil}"
        for text in texts:
            assert text in self.ssh.err and text in self.hil.err, f"ssh: {self.ssh}\nhil: {self.hil}"
        assert code != 4 or "hint:" in self.hil.err, f"hil: {self.hil}"

    def assert_equal(self) -> None:
        """Assert that both logged in to the same server, or that both failed."""
        if not self._is_rejected:
            assert self.hil.reached == self.ssh.reached, f"ssh: {self.ssh}\nhil: {self.hil}"

    @property
    def _is_rejected(self) -> bool:
        """Return whether hil rejected a file that it cannot read completely without `ssh`."""
        named = re.search(
            r"(^|\s)/\S+, line \d+: |cannot read /|ssh refuses /|Include settings are nested deeper than \d+ levels: /",
            self.hil.err,
        )
        return self.transport == PARAMIKO and self.hil.code == 2 and bool(named)


class UserNamespace:
    """Mount namespace in which passwd contains a temporary home directory, with a server for its commands."""

    def __init__(self, folder: Path, prefix: tuple[str, ...] = ()) -> None:
        self._home = folder / "home"
        passwd = folder / "passwd"
        lines = Path("/etc/passwd").read_text().splitlines()
        kept = [line for line in lines if not line.startswith("root:")]
        passwd.write_text("\n".join([f"root:x:0:0:root:{self._home}:/bin/sh", *kept]) + "\n")
        self.system_config = folder / "ssh_config"
        self.system_config.write_text("")
        mounts = (
            f"mount --make-rprivate /; mount --bind '{passwd}' /etc/passwd; "
            f"mount --bind '{self.system_config}' /etc/ssh/ssh_config; exec \"$@\""
        )
        self.commands = CommandServer(folder, [*prefix, "unshare", "--mount", "sh", "-ec", mounts, "sh"])

    def enter(self, home: Path) -> Path:
        """Use a directory as the user's home directory. Return its name in passwd."""
        self._home.unlink(missing_ok=True)
        self._home.symlink_to(home)
        return self._home


@dataclass
class User:
    """User of this machine, with an empty ~/.ssh at the start."""

    namespace: UserNamespace
    folder: Path
    transport: str = OPENSSH
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "home/.ssh").mkdir(parents=True, mode=0o700)
        self.home = self.namespace.enter(self.folder / "home")
        self.namespace.system_config.write_text("")
        self.ssh_folder = self.home / ".ssh"
        self.known_hosts = self.ssh_folder / "known_hosts"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SSH_", "HIL_", "DISPLAY"))}
        kept |= {"HOME": str(self.home), "HIL_CACHE_DIR": str(self.folder / "cache"), "XDG_CONFIG_HOME": ""}
        self.env = kept | self.env

    def write(self, name: str, text: str | bytes, mode: int = 0o600) -> Path:
        """Write a file below ~/.ssh."""
        path = self.ssh_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return path

    def configure(self, *lines: str) -> None:
        """Write ~/.ssh/config."""
        self.write("config", "\n".join(lines) + "\n")

    def take_key(self, key: Path, name: str = "id_ed25519", *, public: bool = True) -> Path:
        """Copy a key pair into ~/.ssh."""
        if public:
            self.write(f"{name}.pub", key.with_name(f"{key.name}.pub").read_bytes(), 0o644)
        return self.write(name, key.read_bytes())

    def pin(self, server: Sshd, name: str = "", key: Path | None = None) -> None:
        """Add a host key to known_hosts. The default is the server's key with its address."""
        public = (key or server.host_key).with_suffix(".pub").read_text()
        with self.known_hosts.open("a") as file:
            file.write(f"{name or f'[{LOOPBACK}]:{server.port}'} {public}")

    def run(self, *argv: str, stdin: Path = Path(os.devnull), timeout: float = TIMEOUT_S) -> Ended:
        """Run a program without a terminal. ``hil`` is the hil of this checkout."""
        without_ssh = argv[0] == "hil" and self.transport == PARAMIKO
        env = {**self.env, "PATH": _PATH_WITHOUT_SSH} if without_ssh else self.env
        done = self.namespace.commands.run(argv, env=env, cwd=self.folder, stdin=stdin, timeout=timeout)
        assert "Traceback" not in done.err, done.err
        return Ended(done.code, done.out, done.err)

    def ssh(self, name: str = "board", *options: str, timeout: float = TIMEOUT_S) -> Ended:
        """Log in with plain `ssh`. ``options`` are options of ssh."""
        command = ["ssh", "-o", "BatchMode=yes", *options, name, "printenv SSH_CONNECTION"]
        return self.run(*command, timeout=timeout)

    def hil(self, address: str = "ssh:board", *options: str, timeout: float = TIMEOUT_S) -> Ended:
        """Log in with `hil board shell`. ``options`` are options of hil. Skips the test if the transport is not
        OpenSSH.
        """
        self._require_openssh()
        return self._hil(address, *options, timeout=timeout)

    def _hil(self, address: str, *options: str, timeout: float) -> Ended:
        command = ["hil", "board", "shell", *options, address, "--", "printenv", "SSH_CONNECTION"]
        return self.run(*command, timeout=timeout)

    def ping(self) -> Ended:
        """Run a command on the board with `hil board ping`, without an agent. Only for the OpenSSH transport."""
        self._require_openssh()
        return self.run("hil", "board", "ping", "ssh:board", "--runtime-hw-type", "command", "--count", "1")

    def _require_openssh(self) -> None:
        if self.transport == PARAMIKO:
            pytest.skip("a promise of OpenSSH's transport")

    def both(
        self,
        name: str = "board",
        address: str = "",
        *,
        ssh: tuple[str, ...] = (),
        hil: tuple[str, ...] = (),
        timeout: float = TIMEOUT_S,
    ) -> Both:
        """Log in with `ssh` and `hil` at the same time. ``ssh`` and ``hil`` are the options of each program."""
        with ThreadPoolExecutor(2) as pool:
            plain = pool.submit(self.ssh, name, *ssh, timeout=timeout)
            ours = pool.submit(self._hil, address or f"ssh:{name}", *hil, timeout=timeout)
            return Both(plain.result(), ours.result(), self.transport)


def host(name: str, server: Sshd, *more: str, hostname: str = LOOPBACK) -> str:
    """Return a block of ssh_config for a server.

    The lines of ``more`` are first, because the first value has priority.
    """
    lines = [*more, f"HostName {hostname}", f"Port {server.port}", f"User {server.user}"]
    return "\n  ".join([f"Host {name}", *lines]) + "\n"


@contextmanager
def user_namespace(folder: Path, prefix: tuple[str, ...] = ()) -> Iterator[UserNamespace]:
    """Namespace for the tests of a module. ``prefix`` is the start of the server's command line, such as nsenter and
    options.
    """
    namespace = UserNamespace(folder, prefix)
    try:
        yield namespace
    finally:
        namespace.commands.close()
