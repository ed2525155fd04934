"""Login with the user's ``ssh``: one connection per board, shared by sessions and forwards.

The ssh process reads the user's configuration as usual. hil adds defaults for options that the user does not set. hil
overrides only options that a connection without a terminal needs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
import selectors
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hil.controller.devices.ssh.address import SSH_PORT, Address
from hil.controller.devices.ssh.openssh import mux
from hil.controller.devices.ssh.openssh.log import KNOWN_HOSTS_HINT, Log, LogReader, make_config_error
from hil.controller.devices.ssh.questions import PASSWORD_VARIABLE, Questions
from hil.controller.devices.ssh.transport import (
    ALIVE_COUNT,
    ALIVE_INTERVAL_SECONDS,
    FAST_CIPHERS,
    FAST_KEX,
    CommandSession,
    Forward,
    SshDestination,
)
from hil.core.board_config import Connection
from hil.core.files import read_text
from hil.core.processes import wait_or_kill
from hil.core.scratch import make_folder
from hil.errors import StorageError, UsageError

_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_PIECE = 1 << 16
# Timeouts in seconds: for a silent ssh, for a login without prompts, and for an ssh agent that does not list its keys.
_SILENCE_SECONDS = 120.0
_LOGIN_SECONDS = 300.0
_AGENT_SECONDS = 10.0
_FORCED = {
    "ControlMaster": "yes",
    "ControlPersist": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "Tunnel": "no",
    "VisualHostKey": "no",
    # hil reads the user, host and host key from log lines of this level.
    "LogLevel": "DEBUG1",
}
_DEFAULTS = {
    "ServerAliveInterval": str(ALIVE_INTERVAL_SECONDS),
    "Ciphers": "^" + ",".join(FAST_CIPHERS),
    "KexAlgorithms": "^" + ",".join(FAST_KEX),
}
_KEYS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
_UNQUOTABLE = set('"\n\\')
_WHILE_HIL_LIVES = read_text(Path(__file__).with_name("while_hil_lives.sh"))


def is_usable() -> bool:
    """Return whether ``ssh`` is installed and this user is in the user database, which ssh requires."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return shutil.which("ssh") is not None


class OpenSsh:
    """Login with ``ssh``; see :class:`hil.controller.devices.ssh.transport.Transport`.

    Args:
        settings: Connection settings with absolute paths.
        timeout: Default of ConnectTimeout in seconds.
        alive_count: Default of ServerAliveCountMax.

    Raises:
        UsageError: The address, a file or the ssh config is invalid.
        BoardError: The board is not reached or refuses the login.
    """

    def __init__(
        self, address: Address, settings: Connection, board: str, timeout: float, alive_count: int = ALIVE_COUNT
    ) -> None:
        self._folder = make_folder("hil-ssh-", for_sockets=True)
        self._questions = Questions(self._folder, host_key=settings.host_key)
        self._log = Log(address, settings, board)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            asked = self._questions
            defaults = {"ConnectTimeout": str(max(1, round(timeout))), "ServerAliveCountMax": str(alive_count)}
            config = _write_config(
                self._folder, settings, defaults, is_interactive=asked.is_interactive, can_answer=asked.can_answer
            )
            self._destination = _build_destination(address)
            self._socket = self._folder / "ctl"
            self._log_in(["-F", str(config), *_build_options(self._socket, settings), *self._destination])
        except BaseException:
            self.close()
            raise
        finally:
            self._questions.close()
        self.user, self.port, self.fingerprint = self._log.user, self._log.port, self._log.fingerprint

    def start(self, command: str, timeout: float) -> CommandSession:
        """Run a command line in the login shell."""
        return mux.open_session(self._socket, command, timeout)

    def refusal(self, remote: str | int) -> str:
        """Return the server's reason for refusing a connection to a board's socket; "" if accepted."""
        local = self._folder / "try"
        forward = self.forward(local, remote)
        try:
            with socket.socket(socket.AF_UNIX) as near:
                near.connect(str(local))
                # The server responds in order. So after the response to this command, the response to the connection
                # has arrived.
                session = self.start("true", _SILENCE_SECONDS)
                with contextlib.suppress(EOFError):
                    session.wait(_SILENCE_SECONDS)
                session.close()
                near.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if not near.recv(1):
                        return self._log.find_refusal() or "no reason given"
        except ConnectionError:
            return self._log.find_refusal() or "no reason given"
        finally:
            forward.close()
        return ""

    def forward(self, local: Path, remote: str | int) -> Forward:
        """Forward a local Unix socket to a socket on the board."""
        return _Forward(self, mux.open_forward(self._socket, local, remote), self._log)

    def interactive(self, command: str) -> int:
        """Run a command line on the terminal and return the exit code. The ssh process shows connection errors."""
        # Do not read the config: the open connection already has its settings, and reading would run the Match commands
        # again.
        terminal = "-t" if sys.stdin.isatty() else "-T"
        shown = ["ssh", "-F", "none", "-S", str(self._socket), "-o", "ControlMaster=no", terminal, *self._destination]
        return subprocess.call([*shown, *filter(None, [command])])

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Return whether the ssh process has exited or exits within ``within_s`` seconds."""
        assert self._process is not None
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End the ssh process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            wait_or_kill(self._process, _CLOSE_SECONDS, group=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _log_in(self, arguments: list[str]) -> None:
        """Start the ssh process and answer prompts until the login succeeds."""
        fifo = self._folder / "log"
        os.mkfifo(fifo, 0o600)
        own_words = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        environment = {**os.environ, **self._questions.environment}
        environment.pop(PASSWORD_VARIABLE, None)
        # A separate process session: ssh has no terminal for prompts, and the controller handles Ctrl-C.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WHILE_HIL_LIVES, "sh", "ssh", "-E", str(fifo), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        with self._process.stdout as first_line:
            ssh = int(first_line.readline() or 0)
        reader = LogReader(self._log, own_words, self._process.stderr)
        reader.start()
        with selectors.DefaultSelector() as waiting, reader.changed:
            waiting.register(self._questions.listener, selectors.EVENT_READ)
            waiting.register(reader.changed, selectors.EVENT_READ)
            self._wait(waiting, reader, ssh)
        self._questions.remember()

    def _wait(self, waiting: selectors.BaseSelector, reader: LogReader, ssh: int) -> None:
        deadline = time.monotonic() + _LOGIN_SECONDS
        is_open = False
        while True:
            found = [key.fileobj for key, _ in waiting.select(_POLL_SECONDS)]
            if reader.changed in found:
                reader.changed.recv(_PIECE)
            if self._questions.listener in found:
                asked = time.monotonic()
                self._questions.answer_one(ssh)
                reader.last = time.monotonic()
                # The timeout does not include the time that the user needs for an answer.
                deadline += reader.last - asked
            # The socket may exist before the log line is read.
            if self._log.is_logged_in and self._socket.exists():
                with contextlib.suppress(OSError, EOFError):
                    # Check the connection only once, because each check adds lines to the log.
                    if not is_open:
                        mux.check(self._socket)
                        is_open = True
                    # The server can imitate the log line about the login. ssh creates the socket after all of its own
                    # lines about the login.
                    if reader.has_read_all():
                        return self._log.check_host_key()
            if self.has_ended():
                reader.join(_CLOSE_SECONDS)
                raise self._log.error()
            silent = time.monotonic() - reader.last
            if self._questions.declined:
                raise self._log.make_declined_error(self._questions.declined)
            if self._log.is_agent_asked and silent > _AGENT_SECONDS:
                raise self._log.make_silent_agent_error(_AGENT_SECONDS)
            if silent > _SILENCE_SECONDS:
                raise self._log.is_silent(_SILENCE_SECONDS)
            if time.monotonic() > deadline:
                raise self._log.make_slow_login_error(_LOGIN_SECONDS)


class _Forward:
    """Forward through the ssh process."""

    def __init__(self, transport: OpenSsh, close: Callable[[], None], log: Log) -> None:
        self._transport = transport
        self.close = close
        self.log = log.text

    def alive(self) -> bool:
        return not self._transport.has_ended()


def look_up(address: Address) -> SshDestination:
    """Resolve an address with the ssh config. Raises UsageError if the config is invalid."""
    folder = make_folder("hil-ssh-")
    try:
        config = _write_config(folder, Connection(), {}, is_interactive=False, can_answer=False)
        command = ["ssh", "-F", str(config), "-G", *_build_destination(address)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        raise make_config_error(done.stderr)
    found = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    proxies = [value for key in ("proxyjump", "proxycommand") if (value := found.get(key, "none")) != "none"]
    return SshDestination(found.get("hostname", address.host), int(found.get("port", SSH_PORT)), *proxies[:1])


def _build_destination(address: Address) -> list[str]:
    """Return the ssh arguments for an address."""
    port = ["-p", str(address.port)] if address.port else []
    user = ["-l", address.user] if address.user else []
    return [*port, *user, address.host]


def _build_options(socket_path: Path, settings: Connection) -> list[str]:
    """Return the command-line options, which apply only to the board.

    Options in the config file also apply to jump hosts.
    """
    options = {**_FORCED, "ControlPath": _escape_path(socket_path)}
    if settings.identity:
        # Use only the requested key, from a file or from an agent that has the private part.
        options |= {"IdentityFile": _quote_path(settings.identity), "IdentitiesOnly": "yes"}
    if settings.known_hosts:
        options["UserKnownHostsFile"] = _quote_path(settings.known_hosts)
    if _read_version() >= (8, 7):
        options["ForkAfterAuthentication"] = "no"
    return ["-N", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]


@functools.cache
def _read_version() -> tuple[int, int]:
    """Return the version of ssh, or (0, 0) if unknown."""
    said = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL).stderr
    found = re.match(r"OpenSSH_(?:for_\w+_)?(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _write_config(
    folder: Path, settings: Connection, defaults: Mapping[str, str], *, is_interactive: bool, can_answer: bool
) -> Path:
    """Write the ssh config file, which also applies to jump hosts.

    The file contains, in this order: the overrides, includes of the user's and the system's config, and the defaults.

    Args:
        defaults: Defaults for this login in addition to the common defaults.
    """
    forced: dict[str, str] = {}
    defaults = {**_DEFAULTS, **defaults}
    if settings.known_hosts:
        # Add the known hosts as global files, so that jump hosts also use their own UserKnownHostsFile.
        places = " ".join(f"/etc/ssh/ssh_known_hosts{number}" for number in ("", "2"))
        forced["GlobalKnownHostsFile"] = f"{_quote_path(settings.known_hosts)} {places}"
    if settings.host_key or settings.accept_new_host_key:
        # With a fingerprint, ssh asks whether the key is right, and hil answers with the fingerprint.
        forced["StrictHostKeyChecking"] = "ask" if settings.host_key else "accept-new"
        if settings.known_hosts:
            _make_folder(Path(settings.known_hosts).parent)
    if not is_interactive:
        # Refuse an unknown host key; the error contains the host name.
        defaults["StrictHostKeyChecking"] = "yes"
        forced |= {"NumberOfPasswordPrompts": "1"} if can_answer or settings.host_key else {"BatchMode": "yes"}
    includes = ["~/.ssh/config"]
    own: list[str] = []
    at_home = pwd.getpwuid(os.getuid()).pw_dir
    home = Path(os.environ.get("HOME") or at_home)
    if home != Path(at_home) and (home / ".ssh").is_dir():
        # Include the user's config explicitly, because ssh ignores HOME.
        includes = [_quote_path(home / ".ssh" / "config")]
        known = " ".join(_quote_path(home / ".ssh" / name) for name in ("known_hosts", "known_hosts2"))
        own = [f"UserKnownHostsFile {known}"]
        own += [f"IdentityFile {_quote_path(home / '.ssh' / key)}" for key in _KEYS if (home / ".ssh" / key).exists()]
    system = next((place for place in _list_system_configs() if place.exists()), None)
    includes += [_quote_path(system)] if system else []
    lines = [*(f"{key} {value}" for key, value in forced.items()), *(f"Include {place}" for place in includes)]
    lines += ["Host *", *(f"  {key} {value}" for key, value in defaults.items()), *(f"  {line}" for line in own)]
    config = folder / "config"
    # Paths may have any encoding.
    config.write_bytes(os.fsencode("\n".join(lines) + "\n"))
    return config


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot pin a host key in {folder}: {error.strerror}", hint=KNOWN_HOSTS_HINT) from error


def _list_system_configs() -> list[Path]:
    """Return candidate paths of the system's ssh_config, for system and other installations of ssh."""
    prefix = Path(shutil.which("ssh") or "/usr/bin/ssh").parent.parent
    apart = [] if prefix in (Path("/usr"), Path("/")) else [prefix / "etc/ssh/ssh_config", prefix / "etc/ssh_config"]
    return [*apart, Path("/etc/ssh/ssh_config"), Path("/usr/etc/ssh/ssh_config")]


def _escape_path(path: str | Path) -> str:
    """Escape a path against ssh's token expansion. Raises UsageError for ``${``, which has no escape."""
    if "${" in str(path):
        raise UsageError(f"ssh cannot read the path {str(path)!r}", hint="rename the path: ${ is unsupported")
    return str(path).replace("%", "%%")


def _quote_path(path: str | Path) -> str:
    """Quote a path for the ssh config. Raises UsageError if the path cannot be quoted."""
    if _UNQUOTABLE & set(str(path)):
        raise UsageError(
            f"ssh cannot read the path {str(path)!r}", hint="rename the path: quotes and backslashes are unsupported"
        )
    return f'"{_escape_path(path)}"'
