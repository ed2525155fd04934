"""A shell on a board: run commands, move files. A link that breaks ends in BoardLost, within a time that is bounded."""

from __future__ import annotations

import contextlib
import io
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import paramiko

from hil.controller.devices.ssh import connect, openssh
from hil.controller.devices.ssh.address import Address, parse_address
from hil.controller.devices.ssh.command import MOST_OUT, TooMuch, execute
from hil.controller.devices.ssh.connect import Hop
from hil.controller.devices.ssh.files import Files
from hil.core.boards import Connection
from hil.core.files import replacing
from hil.errors import BoardError, BoardLost, StorageError

_LONGEST_NAME = 80
_END_S = 3.0
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Done:
    """How a command ended.

    Attributes:
        argv: the command.
        code: its exit code; 128 + N where signal N ended it.
        out: what it wrote to stdout.
        err: what it wrote to stderr, the last 64 KiB of it.
    """

    argv: tuple[str, ...]
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """``out`` as text, without space around it."""
        return self.out.decode(errors="replace").strip()


class Shell:
    """A login on a board; several threads may use it at the same time.

    Attributes:
        address: ``USER@HOST[:PORT]``, for messages.
        fingerprint: the host key's, ``SHA256:...``.
        user: who is logged in.
        board: how errors call the board.
        hops: the machines that we are logged in to; the last is the board.
    """

    def __init__(self, hops: tuple[Hop, ...], address: Address, board: str) -> None:
        self.hops = hops
        self.board = board
        board_hop = hops[-1]
        self.user: str = board_hop.connection.user
        self.address = str(Address(address.host, self.user, board_hop.connection.port))
        self.fingerprint: str = board_hop.host_key.fingerprint
        self.transport = board_hop.transport
        self.transport.watch(lambda: connect.close(hops))
        self._files = Files(self.transport)

    def __enter__(self) -> Shell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Path | None = None,
        timeout: float = 30.0,
        check: bool = True,
        progress: Progress | None = None,
    ) -> Done:
        """Run a command and wait for its end.

        The arguments arrive on the board as they are: nothing in them is expanded.

        Args:
            argv: the program and its arguments.
            stdin: what it reads: bytes, or a file's contents; otherwise it finds the end at once.
            timeout: seconds that it may take altogether.
            check: whether a code other than 0 is an error.
            progress: told the bytes of each piece of ``stdin`` that was sent.

        Raises:
            BoardError: it failed, or wrote more than 16 MiB.
            BoardLost: it did not end in time, or the link broke.
        """
        line = shlex.join(argv)
        name = line if len(line) < _LONGEST_NAME else f"{line[:_LONGEST_NAME]}..."
        out = io.BytesIO()
        source = stdin.open("rb") if isinstance(stdin, Path) else io.BytesIO(stdin or b"")
        with source, self._seam(f"`{name}`", f"`{name}` was not started"):
            try:
                code, err = execute(self.transport, line, source, out, timeout, progress=progress)
            except TimeoutError:
                raise BoardLost(f"`{name}` did not answer within {timeout:g} s", board=self.board) from None
            except TooMuch:
                raise BoardError(f"`{name}` wrote more than {MOST_OUT >> 20} MiB", board=self.board) from None
        if check and code:
            raise BoardError(f"`{name}` failed with code {code}", board=self.board, detail=err.strip())
        return Done(tuple(argv), code, out.getvalue(), err)

    def put(self, local: Path, remote: str, *, mode: int = 0o600, progress: Progress | None = None) -> None:
        """Send a file. It appears under its name once it is complete, and replaces what had that name.

        Args:
            local: the file here.
            remote: its name there; its folder must be there.
            mode: its permissions there.
            progress: told the bytes of each piece that was sent.

        Raises:
            BoardError: it cannot be written there.
            BoardLost: the link broke.
        """
        part = f"{remote}.{secrets.token_hex(4)}.part"
        with local.open("rb") as source, self._seam(f"writing {remote}", f"cannot write {remote}"):
            self._files.put(source, remote, part, mode, progress)

    def get(self, remote: str, local: Path, most: int) -> None:
        """Fetch a file of at most so many bytes; it appears here once it is complete.

        Raises:
            BoardError: it cannot be read there, or is larger.
            BoardLost: the link broke.
            StorageError: it cannot be written here.
        """
        reading = self._seam(f"reading {remote}", f"cannot read {remote}")
        try:
            with replacing(local) as part, part.open("wb") as sink, reading:
                self._files.get(remote, _Stored(sink), most)
        except OSError as error:  # the last piece of a file is written when it is closed
            raise StorageError(f"cannot write {local}: {error.strerror}") from error

    def interactive(self, argv: Sequence[str] = ()) -> int:
        """Give the terminal to a command, or to the login's own shell; returns its exit code.

        OpenSSH's client, where there is one, says itself what went wrong with the link, and ends with 255.

        Raises:
            BoardLost: the link broke, where there is no such client.
        """
        if openssh.can_log_in(self.hops):
            with openssh.private_folder() as folder:
                terminal = ["-t"] if sys.stdin.isatty() else []
                command = [*openssh.command(self.hops, folder), *terminal, openssh.BOARD]
                return subprocess.call([*command, shlex.join(argv)] if argv else command)
        with self._seam("the terminal", "no terminal"):
            line = shlex.join(argv) or 'exec "$SHELL" -l'
            code: int = self.hops[-1].connection.run(line, pty=True, warn=True).exited
            return code

    def close(self) -> None:
        """Log out."""
        connect.close(self.hops)

    def is_alive(self) -> bool:
        """Whether the link is up, as far as is known: a broken one is noticed within 15 seconds."""
        return self.transport.is_active()

    @contextlib.contextmanager
    def _seam(self, what: str, failed: str) -> Iterator[None]:
        """paramiko's errors and those of sockets become ours: the link broke during ``what``, or else ``failed``."""
        try:
            yield
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not isinstance(error, OSError) or "closed" in str(error):
                # The end of a link is told to its channels before it is to be seen in the transport.
                self.transport.join(_END_S)
            if isinstance(error, TimeoutError) or not self.transport.is_active():
                raise BoardLost(f"the connection to {self.address} broke during {what}", board=self.board) from error
            raise BoardError(f"{failed}: {error}", board=self.board) from error


class _Stored:
    """A local file whose errors are told from the board's."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: bytes, /) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            raise StorageError(f"cannot write {self._file.name}: {error.strerror}") from error


def open_shell(address: str, connection: Connection, *, board: str, base: Path, timeout: float = 10.0) -> Shell:
    """Log in to a board.

    Args:
        address: as a user writes it: ``USER@HOST[:PORT]``, ``ssh:HOST``.
        connection: the board config's: which key, which pinned host keys.
        board: how errors call the board.
        base: the folder that relative paths in the config are relative to.
        timeout: seconds for each of: connecting, the server's greeting, logging in.

    Raises:
        UsageError: the address, or a file of the config, is wrong.
        HostKeyRefused: the host key is not the pinned one, or none is pinned.
        BoardUnreachable: nobody answers, or we are not let in.
    """
    place = parse_address(address)
    return Shell(connect.connect(place, connection, board=board, base=base, timeout=timeout), place, board)
