"""Programs on a board without an agent: files named by their content, pushed once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.devices.agentless import scripts
from hil.core.digest import digest_file
from hil.errors import BoardError, BoardLost, LoadFailed

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

Progress = Callable[[int, int], None]
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_CHECK_S = 120.0
# On a full disk, programs that nobody has used for an hour make room; else those of a month ago go.
_PRUNE_MINUTES = 30 * 24 * 60
_FULL_PRUNE_MINUTES = 60
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class Item:
    """A file that the board is to have.

    Attributes:
        path: on this host.
        digest: of its content; names it there.
        executable: whether it is a program.
    """

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
    """The board's ``programs`` folder.

    Args:
        folder: hil's folder on the board, absolute.
        board: the board's name, for messages.
    """

    def __init__(self, folder: str, board: str) -> None:
        self._folder = folder
        self._board = board
        self._intact: set[str] = set()

    def place(self, item: Item) -> str:
        """Where a file lies on the board."""
        return f"{self._folder}/programs/{item.name}"

    def forget(self) -> None:
        """Look anew at what the board has: it may have been another since."""
        self._intact.clear()

    def push(self, shell: Shell, items: Iterable[Item], progress: Progress) -> int:
        """Send what the board lacks, whole and verified; returns the bytes sent.

        Raises:
            LoadFailed: the board has no room.
            BoardLost: the link broke, or what arrived is not what was sent.
        """
        wanted = {item.name: item for item in items}
        missing = self._missing(shell, [item for name, item in wanted.items() if name not in self._intact])
        if missing:
            self.make_room(shell, sum(item.path.stat().st_size for item in missing), "the program")
            # What made room may be one of ours, of long ago.
            missing = self._missing(shell, wanted.values())
        total = sum(item.path.stat().st_size for item in missing)
        sent = 0

        def count(size: int) -> None:
            nonlocal sent
            sent += size
            progress(sent, total)

        for item in missing:
            try:
                shell.put(item.path, self.place(item), mode=0o700 if item.executable else 0o600, progress=count)
            except BoardLost:
                raise
            except BoardError:
                self.make_room(shell, item.path.stat().st_size, "the program")
                raise
        if damaged := self._missing(shell, missing):
            raise BoardLost(
                f"{damaged[0].path.name} was damaged on its way to the board", board=self._board, stage="push"
            )
        self._intact |= wanted.keys()
        return total

    def make_room(self, shell: Shell, size: int, what: str) -> None:
        """Remove what has long not been used, and more of it where ``size`` bytes do not fit.

        Raises:
            LoadFailed: they still do not fit.
        """
        self._intact.clear()
        for minutes in (_PRUNE_MINUTES, _FULL_PRUNE_MINUTES):
            said = shell.run(scripts.room(self._folder, minutes), timeout=_CHECK_S, check=False)
            free = scripts.free_bytes(said.text)
            if free is None or free >= size + _SPARE_BYTES:
                return
        raise LoadFailed(
            f"the board has no room for {what}: {size} bytes, and {free} are free",
            board=self._board,
            hint=f"make room on the board's disk, or set connection.folder to another place than {self._folder}",
        )

    def free_bytes(self, shell: Shell) -> int | None:
        """How many bytes are free in hil's folder; None where the board does not tell."""
        said = shell.run(scripts.room(self._folder, _PRUNE_MINUTES), timeout=_CHECK_S, check=False)
        return scripts.free_bytes(said.text)

    def _missing(self, shell: Shell, items: Iterable[Item]) -> list[Item]:
        """Those that the board does not have as they are here."""
        asked = list(items)
        if not asked:
            return []
        said = shell.run(scripts.have([self.place(item) for item in asked]), timeout=_CHECK_S)
        try:
            found = scripts.sizes_and_sums(said.out.decode(errors="replace"))
            pairs = list(zip(asked, found, strict=True))
        except ValueError as error:
            raise BoardError(
                "the board's shell does not do what a POSIX shell does",
                board=self._board,
                detail=f"{said.text}\n{said.err}",
            ) from error
        return [item for item, one in pairs if not _is_same(item, one)]


def _is_same(item: Item, found: tuple[int, str] | None) -> bool:
    if found is None or found[0] != item.path.stat().st_size:
        return False
    if not found[1]:  # the board has no tool for it: the name and the size have to do
        return True
    return digest_file(item.path, "sha256") == f"sha256:{found[1]}"


def find_program(shell: Shell, program: str) -> str:
    """Where the program that a config names lies on the board.

    Args:
        shell: of the board.
        program: its name or path.

    Raises:
        LoadFailed: it is not there.
    """
    said = shell.run(["sh", "-c", 'command -v -- "$1"', "hil", program], timeout=_CHECK_S, check=False)
    if said.code or not said.text:
        raise LoadFailed(
            f"the board has no program {program!r}",
            hint="[runtime] program in the board's config is looked for in the login's PATH there",
        )
    return said.text
