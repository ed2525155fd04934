"""Parse the log of a connecting ``ssh``, and map it to errors. No other module parses these texts.

The log distinguishes lines of ssh itself from lines of other sources: server banners, jump hosts and proxies. The
patterns match OpenSSH 8 to 10, which does not translate messages.

A server can add lines to ssh's own lines: ssh logs the server's text, such as SSH_MSG_DEBUG, with its line breaks. The
server cannot remove lines. Contradictory lines therefore show a server that imitates ssh.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from hil.controller.devices.ssh.address import Address, name_of
from hil.controller.devices.ssh.errors import (
    HostKeyRefused,
    LoginRefused,
    LoginSlow,
    NoSuchHost,
    ProxyFailed,
    TurnedAway,
)
from hil.controller.devices.ssh.questions import PASSWORD_VARIABLE
from hil.core.board_config import Connection
from hil.errors import BoardError, BoardRefused, BoardUnreachable, HilError, StorageError, UsageError

KNOWN_HOSTS_HINT = "set a writable file: --known-hosts FILE"
_LINES = 200
_MAX_LINE = 1000
_DEBUG = "debug1: "
_PLACE = re.compile(r"Authenticating to (?P<host>.*):(?P<port>\d+) as '(?P<user>.*)'")
_KEY = re.compile(r"Server host key: (?P<key>(?P<kind>\S+) (?P<print>SHA256:\S+))")
_PROXY = re.compile(r"Executing proxy command: (?:exec )?(?P<command>.*)")
_JUMP = re.compile(r"Setting implicit ProxyCommand from ProxyJump: .* (?P<host>\S+)$")
_TRIED = re.compile(r"(?:Offering public key|Trying private key): (?P<key>\S.*)")
_METHOD = re.compile(r"Next authentication method: (?P<method>password|keyboard-interactive)")
_ACCEPTED = re.compile(r"Server accepts key: (?P<key>\S.*)")
_NO_HOST = re.compile(r"Could not resolve host(?:name)? \"?(?P<host>[^\s\":]+)\"?")
_CONNECT = re.compile(r"ssh: connect to (?:host|address) (?P<host>\S+) port (?P<port>\d+): (?P<why>.*)")
_OPEN_FAILED = re.compile(r"channel \d+: open failed: (?P<why>.*)")
_SILENT = re.compile(r"^Connection to \S+ port \d+ timed out")
_TIMED_OUT = re.compile(r"timed out|not responding", re.I)
_CLOSED = re.compile(
    r"^(?:kex_exchange_identification|ssh_dispatch_run_fatal|Connection (?:closed|reset)|Disconnected)"
)
_NEGOTIATE = re.compile(r"Unable to negotiate with .*: (?P<why>no matching .*)")
_DENIED = re.compile(r"(?P<place>\S+): Permission denied(?: \((?P<methods>[^)]*)\))?")
_TOO_MANY = re.compile(r"Received disconnect .*Too many authentication failures", re.I)
_UNPINNED = re.compile(r"No (?P<kind>\S+) host key is known for (?P<name>\S+)")
_PINNED = re.compile(r"Offending (?:\S+ )?key in (?P<file>.+?):\d+")
_CHANGED = re.compile(r"(?:REMOTE HOST IDENTIFICATION|Host key for \S+) has changed", re.I)
_REVOKED_WARNING = re.compile(r"REVOKED HOST KEY DETECTED")
_REVOKED = re.compile(r"revoked", re.I)
_UNVERIFIED = re.compile(r"Host key verification failed|verify_host_key|host key.*(?:changed|denied)", re.I)
_NOT_PINNED = re.compile(r"Failed to add the host to the list of known hosts")
_NO_IDENTITY = re.compile(r"no such identity: (?P<file>.*?): (?P<why>[^:]*)$")
_NO_KEY = re.compile(r'Load key "(?P<file>.*)": (?P<why>.*)')
# Decorations of ssh's warnings, and text that ssh adds to every failure.
_DECORATION = re.compile(r"^@|^\*\* |: terminating, |^Connection (?:closed|reset) by|^$")
_EXPOSED = re.compile(r"Permissions (?P<mode>\d+) for '(?P<file>.*)' are too open")


class Log:
    """Log of one ssh process.

    Attributes:
        user, port, fingerprint: Login name, port and fingerprint of the host key, once known.
        is_agent_asked: Whether ssh waits for an ssh agent's list of keys.
        is_logged_in: Whether ssh reported the login. All lines about the host key precede that report.
        is_contradictory: Whether lines of ssh contradict each other, because the server imitates ssh.
    """

    def __init__(self, address: Address, settings: Connection, board: str) -> None:
        self.user, self.port, self.fingerprint = address.user, address.port, ""
        self.is_agent_asked = self.is_logged_in = self.is_contradictory = False
        self._address, self._settings, self._board = address, settings, board
        self._host = address.host
        self._key = ""
        self._key_kind = ""
        self._proxy = self._jump = ""
        self._is_begun = self._is_greeted = self._is_trusted = False
        self._is_changed = self._is_revoked = False
        self._pinned: re.Match[str] | None = None
        self._tried: list[str] = []
        self._accepted = ""
        self._own: deque[str] = deque(maxlen=_LINES)
        self._others: deque[str] = deque(maxlen=_LINES)

    def feed(self, line: str, *, is_own: bool) -> None:
        """Process a line of ssh itself (``is_own``) or of another source."""
        if not is_own:
            self._others.append(line)
        elif line.startswith(_DEBUG):
            self._take_fact(line.removeprefix(_DEBUG))
        elif line.startswith("Authenticated to "):
            # ssh writes this line only once, so a second line is an imitation.
            self.is_contradictory |= self.is_logged_in
            self.is_logged_in = True
        elif line.strip("@"):
            self._own.append(line)
            # ssh writes warnings about the host key only before the end of the key exchange.
            if not self._is_trusted:
                self._is_changed |= _CHANGED.search(line) is not None
                self._is_revoked |= _REVOKED_WARNING.search(line) is not None
                self._pinned = _PINNED.search(line) or self._pinned

    def text(self) -> str:
        """Return the log without debug lines."""
        return "\n".join([*self._others.copy(), *self._own.copy()])

    def find_refusal(self) -> str:
        """Return the server's reason for the last refused channel, or "" if the server gave no reason."""
        found = [match["why"] for line in self._own.copy() if (match := _OPEN_FAILED.search(line))]
        return found[-1] if found else ""

    def check_host_key(self) -> None:
        """Check how the host key was accepted, after the login.

        Raises:
            HostKeyRefused: The key is revoked or has changed, and the ssh config accepts it (StrictHostKeyChecking no);
                or the server imitates ssh.
            StorageError: The key could not be pinned.
        """
        if self.is_contradictory:
            raise self._make_imitated_error()
        if self._is_revoked:
            raise self._make_revoked_error(self._name, f": {self._key}").locate(board=self._board)
        if self._is_changed:
            raise self._make_changed_error(self._name)
        if self._settings.host_key and self.fingerprint != self._settings.host_key:
            raise self._make_unexpected_error(self._name)
        if self._settings.accept_new_host_key and (line := self._find(_NOT_PINNED)):
            raise StorageError(
                f"cannot pin the host key of {self._name}: {line.string}",
                hint=KNOWN_HOSTS_HINT,
            )

    def _take_fact(self, line: str) -> None:
        if match := _PLACE.match(line):
            place = match["host"], int(match["port"]), match["user"]
            self.is_contradictory |= self._is_greeted and place != (self._host, self.port, self.user)
            self._host, self.port, self.user = place
            self._is_greeted = True
        elif match := _KEY.match(line):
            self.is_contradictory |= self._key not in ("", match["key"])
            self._key, self._key_kind, self.fingerprint = match["key"], match["kind"], match["print"]
        elif match := _JUMP.match(line):
            self._jump = match["host"]
        elif match := _PROXY.match(line):
            self._proxy, self._is_begun = match["command"], True
        elif line.startswith("Connecting to "):
            self._is_begun = True
        elif line.startswith("SSH2_MSG_NEWKEYS received"):
            # Before the login, ssh exchanges keys once. A false line would hide a later warning about the host key.
            self.is_contradictory |= self._is_trusted and not self.is_logged_in
            self._is_trusted = self.is_agent_asked = True
        elif line.startswith(("get_agent_identities: agent returned", "Will attempt key", "SSH2_MSG_SERVICE_ACCEPT")):
            self.is_agent_asked = False
        elif match := _METHOD.match(line):
            self._tried.append(match["method"])
        elif match := _TRIED.match(line):
            key = match["key"].removesuffix(" explicit")
            # ssh also reports default key files that do not exist.
            if line.startswith("Offering") or Path(key).exists():
                self._tried.append(key)
        elif match := _ACCEPTED.match(line):
            self._accepted = match["key"]

    # ---- errors

    def error(self) -> HilError:
        """Return the error that ended the ssh process."""
        if self.is_contradictory:
            return self._make_imitated_error()
        found = (
            self._find_host_key_error()
            or self._find_unreached_error()
            or self._find_refused_error()
            or self._make_broken_error()
        )
        found.detail = self.text()
        return found.locate(board=self._board) if isinstance(found, BoardError) else found

    def make_declined_error(self, prompt: str) -> HilError:
        """Return the error for a prompt without an answer."""
        what = f"{self._place} refused the login: no response to the prompt `{prompt}`"
        return LoginRefused(what, board=self._board, hint=self._make_key_hint(), detail=self.text())

    def make_silent_agent_error(self, seconds: float) -> HilError:
        """Return the error for an ssh agent that lists no keys."""
        return BoardRefused(
            f"the ssh agent did not respond within {seconds:g} s",
            board=self._board,
            hint="restart the ssh agent named by SSH_AUTH_SOCK or IdentityAgent (ssh config), or unset SSH_AUTH_SOCK",
        )

    def is_silent(self, seconds: float) -> HilError:
        """Return the error for a login timeout."""
        what = f"{self._place} did not respond within {seconds:g} s"
        return BoardUnreachable(
            what,
            board=self._board,
            hint="check that the host is switched on and connected to this network",
            detail=self.text(),
        )

    def make_slow_login_error(self, seconds: float) -> HilError:
        """Return the error for a login that exceeds the time limit although the server sends data."""
        what = f"{self._place} did not complete the login within {seconds:g} s"
        return BoardUnreachable(
            what, board=self._board, hint="check sshd on the board and on jump hosts", detail=self.text()
        )

    @property
    def _place(self) -> str:
        return str(Address(self._host, self.user, self.port))

    @property
    def _name(self) -> str:
        """Name of the board in known_hosts files."""
        return name_of(self._host, self.port or 22)

    def _find(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return the last match of a pattern. Lines of ssh itself take precedence."""
        for lines in (self._own, self._others):
            for line in reversed(lines.copy()):
                if match := pattern.search(line):
                    return match
        return None

    def _find_last_line(self) -> str:
        """Return the last informative line. Before the connection, lines of a proxy take precedence."""
        for lines in (self._others, self._own) if self._proxy and not self._is_greeted else (self._own, self._others):
            if telling := [line for line in lines.copy() if not _DECORATION.search(line)]:
                return telling[-1]
        return "no reason given by ssh"

    def _find_host_key_error(self) -> HilError | None:
        if not self._find(_UNVERIFIED) or self._is_trusted:
            return None
        own = any(_UNVERIFIED.search(line) for line in self._own)
        unpinned = self._find(_UNPINNED)
        name = unpinned["name"] if unpinned else self._name if own else self._jump or "a jump"
        key = f": {self._key}" if own and self._key else ""
        if self._find(_REVOKED):
            return self._make_revoked_error(name, key)
        if self._find(_CHANGED):
            return self._make_changed_error(name)
        if own and self._key and self._settings.host_key not in ("", self.fingerprint):
            return self._make_unexpected_error(name)
        known_hosts = Path(self._settings.known_hosts or "~/.ssh/known_hosts")
        quoted = str(known_hosts) if str(known_hosts).startswith("~") else shlex.quote(str(known_hosts))
        keyscan = f"{self._build_keyscan(name)} >> {quoted}, or with " if own and not self._proxy else ""
        return HostKeyRefused(
            f"unknown host key of {name}{key}",
            hint="compare the fingerprint with the output of `ssh-keygen -lf /etc/ssh/ssh_host_..._key.pub` on the "
            f"board; if both match, pin the key with {keyscan}--accept-new-host-key",
        )

    def _make_unexpected_error(self, name: str) -> HostKeyRefused:
        return HostKeyRefused(
            f"the host key of {name} is {self._key}, expected {self._settings.host_key}",
            board=self._board,
            hint="a different machine may be using the address; or use the fingerprint of the key of this type: "
            "ssh-keygen -lf /etc/ssh/ssh_host_..._key.pub on the board",
        )

    def _make_imitated_error(self) -> HostKeyRefused:
        return HostKeyRefused(
            f"the server at {self._address} imitates messages of ssh, so its host key and login name are unreliable",
            board=self._board,
            hint="a hostile machine may be using the address: check the board and the network before another login",
            detail=self.text(),
        )

    def _make_revoked_error(self, name: str, key: str) -> HostKeyRefused:
        what = f"the host key of {name} is revoked{key}"
        return HostKeyRefused(what, hint="see ssh's output below", detail=self.text())

    def _make_changed_error(self, name: str) -> HostKeyRefused:
        pinned = self._pinned or self._find(_PINNED)
        file = pinned["file"] if pinned else "known_hosts"
        shown = f"it shows {self._key}, " if self._key else ""
        return HostKeyRefused(
            f"the host key of {name} has changed: {shown}{file} has a different key",
            board=self._board,
            hint="a different machine may be using the address; if the board was reinstalled, remove the old key: "
            + shlex.join(["ssh-keygen", "-f", file, "-R", name]),
            detail=self.text(),
        )

    def _build_keyscan(self, name: str) -> str:
        host, _, port = name.removeprefix("[").partition("]:")
        kind = self._key_kind.removeprefix("ssh-").partition("-")[0]
        return shlex.join(["ssh-keyscan", *(["-p", port] if port else []), *(["-t", kind] if kind else []), host])

    def _find_unreached_error(self) -> HilError | None:
        if self._is_greeted:
            return None
        if match := self._find(_NO_HOST):
            return NoSuchHost(
                f"host {match['host']!r} not found", hint="check the name, and the Host entries of the ssh config"
            )
        if match := self._find(_CONNECT):
            place = name_of(match["host"], int(match["port"]))
            hint = (
                "check that the host is switched on, is connected to this network and runs sshd on this port; "
                "for a different port, use USER@HOST:PORT"
            )
            if match["host"].lower().startswith("fe80:") and "%" not in match["host"]:
                hint = f"a link-local address requires an interface: {match['host']}%eth0"
            kind = TurnedAway if "refused" in match["why"] else BoardUnreachable
            return kind(f"cannot connect to {place}: {match['why']}", hint=hint)
        if self._jump and (match := self._find(_OPEN_FAILED)):
            where = name_of(self._address.host, self._address.port or 22)
            hint = "check that the host is switched on, and that the jump host allows forwarding"
            return BoardUnreachable(f"cannot connect to {where} through {self._jump}: {match['why']}", hint=hint)
        if self._jump and (match := self._find(_DENIED)):
            return LoginRefused(f"{match['place']} refused the login: {match[0]}", hint=self._make_key_hint())
        if self._proxy and self._find(_TIMED_OUT):
            what = f"{self._place} did not respond through {self._jump or 'its ProxyCommand'}"
            return LoginSlow(what, hint="check that the host is switched on and connected to the jump host's network")
        if self._proxy and not self._jump:
            hint = f"run the ProxyCommand of the ssh config manually: `{self._proxy}`"
            why = self._find_last_line() if self._others else "exited without a connection"
            return ProxyFailed(f"the ProxyCommand to {self._address.host} failed: {why}", hint=hint)
        return None

    def _find_refused_error(self) -> HilError | None:
        for file in filter(None, [self._settings.identity]):
            if (match := self._find(_NO_IDENTITY)) and match["file"] == file:
                return UsageError(f"cannot read the identity {file}: {match['why']}")
            if (match := self._find(_NO_KEY)) and match["file"] == file and not self._find(_EXPOSED):
                return UsageError(
                    f"{file} is not a private SSH key: {match['why']}", hint="set a private key with --identity FILE"
                )
        if match := self._find(_NEGOTIATE):
            return BoardUnreachable(
                f"{self._place} and this ssh share no algorithm: {match['why']}",
                hint="allow an algorithm of this host in ~/.ssh/config, such as `HostKeyAlgorithms +ssh-rsa`",
            )
        if self._find(_TOO_MANY):
            return LoginRefused(
                f"{self._place} refused the login: too many keys were offered ({len(self._tried)})",
                hint="select the key: --identity FILE, or IdentityFile and `IdentitiesOnly yes` in ~/.ssh/config",
            )
        if self._is_trusted and self._find(_SILENT):
            what = f"{self._place} did not respond while checking the login"
            return LoginSlow(what, hint="check the connection; sshd may be waiting for a directory service")
        if self._is_trusted:
            tried = ", ".join(self._tried) or "none: no usable key, and no password"
            denied = self._find(_DENIED)
            what = "refused the login" if denied else "closed the connection during login"
            return LoginRefused(f"{self._place} {what}; tried: {tried}", hint=self._make_key_hint())
        return None

    def _make_broken_error(self) -> HilError:
        if not self._is_begun:
            return make_config_error(self.text())
        if self._find(_TIMED_OUT):
            return BoardUnreachable(
                f"{self._place} did not respond in time",
                hint="check with ping that the host is switched on and connected to this network",
            )
        kind = TurnedAway if self._find(_CLOSED) and not self._is_greeted else BoardUnreachable
        what = f"SSH handshake with {self._place} failed: {self._find_last_line()}"
        return kind(what, hint="check that this port belongs to an SSH server")

    def _make_key_hint(self) -> str:
        """Return a hint for a refused login."""
        if match := self._find(_EXPOSED):
            return f"{match[0]}, and ssh ignores it: chmod 600 {shlex.quote(match['file'])}"
        locked = self._accepted.partition(" ")[0] or self._settings.identity
        unlock = (
            f"add the key to the ssh agent with `ssh-add {shlex.quote(locked)}`, which prompts for the passphrase; "
            if locked
            else ""
        )
        place = self._place
        return (
            f"{unlock}install a key with `ssh-copy-id {place}`, select a different key with --identity FILE, "
            f"or set a password in {PASSWORD_VARIABLE}"
        )


def make_config_error(text: str) -> UsageError:
    """Return the error for an ssh that exited before connecting, from the output."""
    telling = [line.strip() for line in text.splitlines() if not _DECORATION.search(line)]
    why = telling[-1] if telling else "no reason given"
    return UsageError(f"ssh cannot connect: {why}", hint="inspect the ssh config with `ssh -G HOST`", detail=text)


class LogReader(threading.Thread):
    """Thread that reads an ssh's output until it exits.

    Attributes:
        changed: Socket that becomes readable after new output.
        last: Monotonic time of the last output.
    """

    def __init__(self, log: Log, own: int, others: IO[bytes]) -> None:
        super().__init__(daemon=True, name="hil-ssh-log")
        self._log = log
        self._own, self._others = own, others
        self.changed, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._feeding = threading.Lock()
        self.last = time.monotonic()

    def has_read_all(self) -> bool:
        """Return whether the log has all lines that ssh has written. False if the thread is busy or has ended."""
        if not self._feeding.acquire(blocking=False):
            return False
        try:
            return self.is_alive() and not select.select([self._own], [], [], 0)[0]
        finally:
            self._feeding.release()

    def run(self) -> None:
        """Read until both streams end."""
        begun = {self._own: b"", self._others.fileno(): b""}
        with self._others, self._wake:
            while begun:
                for descriptor in select.select(list(begun), [], [])[0]:
                    with self._feeding:
                        piece = os.read(descriptor, 1 << 16)
                        *lines, rest = (begun[descriptor] + piece).split(b"\n")
                        if not piece or len(rest) > _MAX_LINE:
                            lines, rest = [*lines, rest], b""
                        for line in filter(None, lines):
                            text = line[:_MAX_LINE].decode(errors="replace").strip()
                            self._log.feed(text, is_own=descriptor == self._own)
                    begun[descriptor] = rest
                    if not piece:
                        del begun[descriptor]
                self.last = time.monotonic()
                with contextlib.suppress(OSError):
                    self._wake.send(b"\0")
            os.close(self._own)
