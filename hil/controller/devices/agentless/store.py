"""hil's folder on a board without an agent: ``programs``, named by their content and pushed once, and ``runs``."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.devices.agentless import scripts
from hil.core.digest import digest_file
from hil.core.scratch import temporary_folder
from hil.errors import BoardError, BoardLost, LoadFailed, RunFailed

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_CHECK_S = 120.0
# On a full disk, programs that nobody has used for an hour make room; else those of a month ago go.
_PRUNE_MINUTES = 30 * 24 * 60
_FULL_PRUNE_MINUTES = 60
_SPARE_BYTES, _INPUTS_SPARE_BYTES = 1 << 20, 1 << 16
_CALL_S = 60.0
# Past its limit the board's side should have answered; then the board itself is given up. It counts seconds by
# sleeping, and a slow board is late at each: 7 % where it is emulated.
_GRACE_S = 15.0
_SLOW = 1.25
_DETAIL = 4000


@dataclass(frozen=True)
class Item:
    """A file that the board is to have, named there by its digest."""

    path: Path
    digest: str
    executable: bool = False

    @property
    def name(self) -> str:
        """Its name on the board: digest and, where it is harmless, what people and tools go by."""
        digest = self.digest.replace(":", "-")
        if self.executable:
            return f"{digest}-{re.sub(_UNSAFE, '_', self.path.name)}"
        return digest + (self.path.suffix if _SUFFIX.fullmatch(self.path.suffix) else "")


class Store:
    """hil's folder on the board: ``folder``, absolute, is set before anything else is asked."""

    def __init__(self, shell: Shell, board: str) -> None:
        self.folder = ""
        self._shell = shell
        self._board = board

    def place(self, item: Item) -> str:
        """Where a file lies on the board."""
        return f"{self.folder}/programs/{item.name}"

    def missing(self, items: Sequence[Item]) -> list[Item]:
        """The files that the board does not have as they are here. Those that it has count as used just now.

        Raises:
            BoardError: the board's shell is not POSIX.
            BoardLost: the link broke.
        """
        if not items:
            return []
        done = self._shell.run(scripts.have([self.place(item) for item in items]), timeout=_CHECK_S)
        try:
            found = scripts.sizes_and_sums(done.out.decode(errors="replace"))
            pairs = list(zip(items, found, strict=True))
        except ValueError as error:
            raise BoardError(
                "the board's shell does not do what a POSIX shell does",
                board=self._board,
                detail=f"{done.text}\n{done.err}",
            ) from error
        return [item for item, one in pairs if not _is_same(item, one)]

    def put(self, items: Iterable[Item], progress: Callable[[int], None]) -> None:
        """Send files whole, and verify them.

        Raises:
            LoadFailed: the board has no room.
            BoardLost: the link broke, or what arrived is not what was sent.
        """
        sent = list(items)
        self.make_room(sum(item.path.stat().st_size for item in sent), "the program")
        for item in sent:
            try:
                mode = 0o700 if item.executable else 0o600
                self._shell.put(item.path, self.place(item), mode=mode, progress=progress)
            except BoardLost:
                raise
            except BoardError:
                self.make_room(item.path.stat().st_size, "the program")
                raise
        if damaged := self.missing(sent):
            raise BoardLost(
                f"{damaged[0].path.name} was damaged on its way to the board", board=self._board, stage="push"
            )

    def make_room(self, size: int, what: str) -> None:
        """Remove what has long not been used, and more of it where ``size`` bytes do not fit.

        Raises:
            LoadFailed: they still do not fit.
        """
        for minutes in (_PRUNE_MINUTES, _FULL_PRUNE_MINUTES):
            done = self._shell.run(scripts.room(self.folder, minutes), timeout=_CHECK_S, check=False)
            free = scripts.free_bytes(done.text)
            if free is None or free >= size + _SPARE_BYTES:
                return
        raise LoadFailed(
            f"the board has no room for {what}: {size} bytes, and {free} are free",
            board=self._board,
            hint=f"make room on the board's disk, or set connection.folder to another place than {self.folder}",
        )

    def free_bytes(self) -> int | None:
        """How many bytes are free in hil's folder; None where the board does not tell."""
        done = self._shell.run(scripts.room(self.folder, _PRUNE_MINUTES), timeout=_CHECK_S, check=False)
        return scripts.free_bytes(done.text)

    @contextlib.contextmanager
    def run_folder(self) -> Iterator[RunFolder]:
        """A folder for a run, here and on the board; both are gone at the end."""
        remote = f"{self.folder}/runs/{secrets.token_hex(8)}"
        with temporary_folder("hil-command-") as local:
            try:
                yield RunFolder(Path(local), remote, self._shell, self)
            finally:
                with contextlib.suppress(BoardError):
                    self._shell.run(scripts.remove(remote), timeout=_CALL_S, check=False)


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, ``local`` here and ``remote`` on the board."""

    local: Path
    remote: str
    _shell: Shell
    _store: Store

    def send(self, files: Sequence[str]) -> None:
        """Make the folder on the board, with inputs in it that lie in the local one.

        Raises:
            RunFailed: the board has no room for them.
            BoardLost: the link broke.
        """
        size = sum((self.local / name).stat().st_size for name in files)
        try:
            self._shell.run(["mkdir", "-m", "700", self.remote], timeout=_CALL_S)
            for name in files:
                self._shell.put(self.local / name, f"{self.remote}/{name}")
        except BoardLost:
            raise
        except BoardError as error:
            free = self._store.free_bytes()
            if free is None or free > size + _INPUTS_SPARE_BYTES:
                raise
            raise RunFailed(f"the board has no room for the inputs: {size} bytes, and {free} are free") from error

    def command(
        self, argv: Sequence[str], files: Sequence[str], *, limit_s: int, wait_s: int, environment: Mapping[str, str]
    ) -> tuple[scripts.Ended, str, float]:
        """Run a command in the folder; returns its end, what it wrote to stderr, and its wall time in seconds.

        It writes ``files``. It is killed after ``limit_s`` whole seconds, and waits ``wait_s`` while another run holds
        the board.

        Raises:
            BoardLost: the link broke, or the board did not answer.
        """
        whole = scripts.run(self.remote, files, argv, limit_s=limit_s, wait_s=wait_s, environment=environment)
        start = time.monotonic()
        try:
            done = self._shell.run(whole, timeout=(limit_s + wait_s) * _SLOW + _GRACE_S, check=False)
        except BoardLost as error:  # its own message shows the script
            raise BoardLost("the link broke or the board hung during the run", detail=error.message) from error
        wall = time.monotonic() - start
        ended = scripts.ended(done.out.decode(errors="replace"))
        if ended is None or ended.how == "gone":
            raise BoardLost("the board ended the run without an answer", detail=done.err[-_DETAIL:])
        return ended, done.err, wall

    def get(self, file: str, size: int) -> Path:
        """Fetch a file that a command wrote, of so many bytes.

        Raises:
            BoardLost: the link broke, or the file has another size.
        """
        local = self.local / file
        self._shell.get(f"{self.remote}/{file}", local, size)
        if local.stat().st_size != size:
            raise BoardLost(f"{file} was damaged on its way from the board")
        return local


def _is_same(item: Item, found: tuple[int, str] | None) -> bool:
    if found is None or found[0] != item.path.stat().st_size:
        return False
    if not found[1]:  # the board has no tool for it: the name and the size have to do
        return True
    return digest_file(item.path, "sha256") == f"sha256:{found[1]}"


def find_program(shell: Shell, program: str) -> str:
    """Where the program that a config names lies on the board. Raises LoadFailed: it is not there."""
    done = shell.run(["sh", "-c", 'command -v -- "$1"', "hil", program], timeout=_CHECK_S, check=False)
    if done.code or not done.text:
        raise LoadFailed(
            f"the board has no program {program!r}",
            hint="[runtime] program in the board's config is looked for in the login's PATH there",
        )
    return done.text
