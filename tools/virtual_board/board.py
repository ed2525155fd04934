"""A virtual board, from outside: reach it, and make happen to it what happens to boards."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.errors import BoardError, BoardLost
from tools.virtual_board.host import end, link_name, says_ssh, unplug
from tools.virtual_board.plan import Plan

_READY_S = 60.0
_ANSWER_S = 30.0
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class VirtualBoard:
    """A board that runs on this machine, with an address, a root file system and an SSH server of its own.

    Args:
        folder: its folder: ``identity`` (the key that root and tester let in), ``known_hosts``, ``console.log``.
    """

    folder: Path
    _lifeline: subprocess.Popen[bytes] | None = field(default=None, repr=False, compare=False)

    #: The login besides root; its password is its name.
    user = "tester"

    @property
    def plan(self) -> Plan:
        """What it was made to be."""
        return Plan.read(self.folder)

    @property
    def name(self) -> str:
        """Its host name."""
        return self.plan.name

    @property
    def arch(self) -> str:
        """Its architecture, as ``uname -m`` on it gives it."""
        return self.plan.arch

    @property
    def ip(self) -> str:
        """Its IP address."""
        return self.plan.ip

    @property
    def address(self) -> str:
        """Where root logs in: ``root@IP``."""
        return f"root@{self.ip}"

    @property
    def identity(self) -> Path:
        """The private key that root and tester let in."""
        return self.folder / "identity"

    @property
    def known_hosts(self) -> Path:
        """The file with its host key."""
        return self.folder / "known_hosts"

    @property
    def link(self) -> str:
        """The network device of this machine that its cable ends at."""
        return link_name(self.ip)

    @property
    def console(self) -> str:
        """What its SSH server and its boot have said."""
        return (self.folder / "console.log").read_text(errors="replace")

    def ssh(self, *options: str, user: str = "root") -> list[str]:
        """The ``ssh`` command up to the board's address, without a look at the caller's own configuration."""
        own = ["-F", "none", "-i", str(self.identity), "-o", f"UserKnownHostsFile={self.known_hosts}"]
        return ["ssh", *own, "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", *options, f"{user}@{self.ip}"]

    def cut(self) -> None:
        """Pull its network cable: what is sent is lost, and neither side is told."""
        self._ask("cut")

    def restore(self) -> None:
        """Plug its network cable in again."""
        self._ask("restore")

    def kill(self) -> None:
        """Cut its power: every process is gone at once, and no connection is closed. What its disk held stays."""
        self._ask("kill")

    def power_on(self, *, wait: bool = True) -> None:
        """Give it power, if it has none, and wait until it can be logged into.

        Raises:
            BoardError: it did not boot.
        """
        self._ask("power_on")
        if wait:
            self.wait()

    def reboot(self, *, wait: bool = True) -> None:
        """Cut its power and give it again at once: another ``boot_id`` and uptime, the same disk.

        Raises:
            BoardError: it did not boot.
        """
        self._ask("reboot")
        if wait:
            self.wait()

    def freeze(self) -> None:
        """Hang it: all its processes stop, while its kernel still acknowledges what is sent to it."""
        self._ask("freeze")

    def thaw(self) -> None:
        """Let its processes go on."""
        self._ask("thaw")

    def run(
        self, argv: Sequence[str], *, stdin: str | None = None, timeout: float = 60.0, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on it as root, not over its network: also while that is cut.

        Args:
            argv: the command; no shell reads it.
            stdin: what the command reads.
            timeout: in seconds.
            check: raise for any exit code but 0.

        Raises:
            BoardError: the board is off, or the command took too long.
            subprocess.CalledProcessError: ``check``, and the command failed.
        """
        answer = self._ask("run", argv=list(argv), stdin=stdin, timeout=timeout)
        done = subprocess.CompletedProcess(list(argv), answer["code"], answer["stdout"], answer["stderr"])
        if check:
            done.check_returncode()
        return done

    def status(self) -> dict[str, str]:
        """Its ``power`` ("on" or "off") and its ``cable`` ("up" or "down")."""
        answer: dict[str, str] = self._ask("status")
        return answer

    def wait(self, timeout: float = _READY_S) -> None:
        """Wait until its SSH server answers.

        Raises:
            BoardError: it did not, in that many seconds.
        """
        deadline = time.monotonic() + timeout
        # A booting board loses the first packet, and the kernel would send it again only after a second; but a network
        # that was made slow takes longer to answer.
        patience = 0.3
        while not says_ssh(self.ip, patience):
            patience = min(1.5 * patience, _PATIENCE_S)
            if self.status()["power"] == "off":
                raise BoardError("the virtual board went off", board=self.name, detail=self.console)
            if time.monotonic() > deadline:
                raise BoardError(f"no SSH server after {timeout:.0f} s", board=self.name, detail=self.console)
            time.sleep(0.02)

    def down(self) -> None:
        """End it and all that belongs to it; nothing of it stays behind. Again is allowed."""
        with suppress(BoardLost):
            address = self.ip
            self._ask("down")
            # The kernel takes it away as well, but in its own time.
            unplug(address)
        # What a board that was ended in another way left behind.
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lifeline is not None:
            assert self._lifeline.stdin is not None
            self._lifeline.stdin.close()
            try:
                self._lifeline.wait(_ANSWER_S)
            except subprocess.TimeoutExpired:  # it hangs
                end(self._lifeline)

    def _ask(self, verb: str, **arguments: Any) -> Any:
        """Have the keeper do something."""
        timeout = arguments.get("timeout", 0.0)
        answered = b""
        try:
            # By way of a descriptor: the name of a socket has to be short.
            folder = os.open(self.folder, os.O_PATH)
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(_ANSWER_S + timeout)
                    connection.connect(f"/proc/self/fd/{folder}/control")
                    connection.sendall(json.dumps([verb, arguments]).encode() + b"\n")
                    with suppress(ConnectionResetError):
                        answered = connection.makefile("rb").read()
            finally:
                os.close(folder)
        except TimeoutError:
            raise BoardLost(f"the virtual board did not {verb} in time", board=self.folder.name) from None
        except OSError as error:
            raise BoardLost(f"no such virtual board runs: {error.strerror}", board=self.folder.name) from None
        if not answered:
            if verb == "down":
                return None
            raise BoardLost("the virtual board ended", board=self.folder.name)
        answer = json.loads(answered)
        if "error" in answer:
            raise BoardError(answer["error"], board=self.folder.name)
        return answer["answer"]
