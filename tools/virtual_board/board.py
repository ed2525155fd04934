"""Control a virtual board from outside: SSH, and simulated events such as power cuts."""

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
from tools.virtual_board.host import end, is_ssh_responding, link_name, unplug
from tools.virtual_board.plan import Plan

_READY_SECONDS = 60.0
_ANSWER_SECONDS = 30.0
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class VirtualBoard:
    """A board that runs on this machine, with a separate address, root file system and SSH server.

    Args:
        folder: the board's directory with ``identity`` (private key for root and tester), ``known_hosts``,
            ``console.log``.
    """

    folder: Path
    _lifeline: subprocess.Popen[bytes] | None = field(default=None, repr=False, compare=False)

    # #: login in addition to root; the password is equal to the login
    user = "tester"

    @property
    def plan(self) -> Plan:
        """Settings with which the board was created."""
        return Plan.read(self.folder)

    @property
    def name(self) -> str:
        """The host name."""
        return self.plan.name

    @property
    def arch(self) -> str:
        """The architecture, as ``uname -m`` prints it."""
        return self.plan.arch

    @property
    def ip(self) -> str:
        """The IP address."""
        return self.plan.ip

    @property
    def address(self) -> str:
        """SSH address of root: ``root@IP``."""
        return f"root@{self.ip}"

    @property
    def identity(self) -> Path:
        """The private key for root and tester."""
        return self.folder / "identity"

    @property
    def known_hosts(self) -> Path:
        """The file with the host key."""
        return self.folder / "known_hosts"

    @property
    def link(self) -> str:
        """Network device on this machine at the end of the board's cable."""
        return link_name(self.ip)

    @property
    def console(self) -> str:
        """Output of the SSH server and the boot."""
        return (self.folder / "console.log").read_text(errors="replace")

    def ssh(self, *options: str, user: str = "root") -> list[str]:
        """Return the ``ssh`` command for the board. The command ignores the caller's SSH configuration."""
        own = ["-F", "none", "-i", str(self.identity), "-o", f"UserKnownHostsFile={self.known_hosts}"]
        return ["ssh", *own, "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", *options, f"{user}@{self.ip}"]

    def cut(self) -> None:
        """Disconnect the network cable: packets are lost, and neither side is notified."""
        self._ask("cut")

    def restore(self) -> None:
        """Reconnect the network cable."""
        self._ask("restore")

    def kill(self) -> None:
        """Cut the power: all processes die at once, and no connection is closed. The disk is preserved."""
        self._ask("kill")

    def power_on(self, *, wait: bool = True) -> None:
        """Switch the board on if it is off, and wait until SSH works.

        Raises:
            BoardError: the board did not boot.
        """
        self._ask("power_on")
        if wait:
            self.wait()

    def reboot(self, *, wait: bool = True) -> None:
        """Cut the power and restore it at once. The ``boot_id`` and uptime change; the disk is preserved.

        Raises:
            BoardError: the board did not boot.
        """
        self._ask("reboot")
        if wait:
            self.wait()

    def freeze(self) -> None:
        """Hang the board: all processes stop, but the kernel still acknowledges packets."""
        self._ask("freeze")

    def thaw(self) -> None:
        """Resume the board's processes."""
        self._ask("thaw")

    def run(
        self, argv: Sequence[str], *, stdin: str | None = None, timeout: float = 60.0, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the board as root. This does not use the network, so it works while the cable is cut.

        Args:
            argv: the command, without a shell.
            stdin: input for the command.
            timeout: in seconds.
            check: raise an error for exit codes other than 0.

        Raises:
            BoardError: the board is off, or the command timed out.
            subprocess.CalledProcessError: the command failed, and ``check`` is set.
        """
        answer = self._ask("run", argv=list(argv), stdin=stdin, timeout=timeout)
        done = subprocess.CompletedProcess(list(argv), answer["code"], answer["stdout"], answer["stderr"])
        if check:
            done.check_returncode()
        return done

    def status(self) -> dict[str, str]:
        """Return the ``power`` ("on" or "off") and ``cable`` ("up" or "down")."""
        answer: dict[str, str] = self._ask("status")
        return answer

    def wait(self, timeout: float = _READY_SECONDS) -> None:
        """Wait until the SSH server responds.

        Raises:
            BoardError: the server did not respond within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        # Start with a short timeout: a booting board loses the first packet, which the kernel would send again only
        # after a second. Increase the timeout later, for networks with a configured delay.
        patience = 0.3
        while not is_ssh_responding(self.ip, patience):
            patience = min(1.5 * patience, _PATIENCE_SECONDS)
            if self.status()["power"] == "off":
                raise BoardError("the virtual board powered off", board=self.name, detail=self.console)
            if time.monotonic() > deadline:
                raise BoardError(
                    f"SSH server not reachable after {timeout:.0f} s", board=self.name, detail=self.console
                )
            time.sleep(0.02)

    def down(self) -> None:
        """End the board and remove all files. Repeated calls are allowed."""
        with suppress(BoardLost):
            address = self.ip
            self._ask("down")
            # remove the device now; the kernel would remove it later
            unplug(address)
        # Remove the files even if the board ended in another way.
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lifeline is not None:
            assert self._lifeline.stdin is not None
            self._lifeline.stdin.close()
            try:
                self._lifeline.wait(_ANSWER_SECONDS)
            except subprocess.TimeoutExpired:  # the keeper hangs
                end(self._lifeline)

    def _ask(self, verb: str, **arguments: Any) -> Any:
        """Send a request to the keeper and return the response."""
        timeout = arguments.get("timeout", 0.0)
        answered = b""
        try:
            # Use a path through a descriptor, because socket paths must be short.
            folder = os.open(self.folder, os.O_PATH)
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(_ANSWER_SECONDS + timeout)
                    connection.connect(f"/proc/self/fd/{folder}/control")
                    connection.sendall(json.dumps([verb, arguments]).encode() + b"\n")
                    with suppress(ConnectionResetError):
                        answered = connection.makefile("rb").read()
            finally:
                os.close(folder)
        except TimeoutError:
            raise BoardLost(f"virtual board request {verb!r} timed out", board=self.folder.name) from None
        except OSError as error:
            raise BoardLost(f"virtual board not running: {error.strerror}", board=self.folder.name) from None
        if not answered:
            if verb == "down":
                return None
            raise BoardLost("the virtual board stopped", board=self.folder.name)
        answer = json.loads(answered)
        if "error" in answer:
            raise BoardError(answer["error"], board=self.folder.name)
        return answer["answer"]
