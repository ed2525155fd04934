"""The boards of a host: which there are, what each is to its worker, and their configs as others see them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomlkit

from hil.controller.farm.paths import FarmAddress
from hil.core.board_config import BoardConfig, Labgrid, Power
from hil.core.boards import find_board, is_file, is_trusted_place, known_boards, load_board, read_board
from hil.errors import UsageError

SIMULATOR = "sim"
_NAME = re.compile(r"\w[\w.-]{0,59}")


@dataclass(frozen=True)
class HostInfo:
    """What the workers of a host share."""

    host: str  # its name, which no other host of the farm has
    site: str
    farm: FarmAddress
    folder: Path  # of this host alone: files of jobs, stores of simulators, logs
    sockets: Path  # a folder with a short path, since those of Unix sockets must be
    boards: int = 1  # how many there are: they share the machine

    @property
    def uplink(self) -> Path:
        """The socket of the process that has the connection to the farm."""
        return self.sockets / "uplink"

    @property
    def files(self) -> Path:
        """What was fetched from the farm's store."""
        return self.folder / "files"


@dataclass(frozen=True)
class BoardEntry:
    """One board of a host."""

    name: str  # the board's, in the whole farm
    config: Path
    folder: Path  # of this board alone
    simulator: tuple[str, ...] = ()  # arguments of `python -m hil.sim`, where the host starts the board itself
    typed: bool = True  # whether the config needs no word of the user's, whoever alters it

    def load(self) -> BoardConfig:
        """Its config, read anew."""
        return load_board(str(self.config), typed=self.typed)


def find_boards(site: HostInfo, named: Sequence[str]) -> list[BoardEntry]:
    """The boards that are named, by name or config file; where none is, every one here that has an address."""
    found: dict[str, BoardEntry] = {}
    for name in named or _reachable():
        config = load_board(name)
        typed = is_file(name) or is_trusted_place(find_board(name))
        if not config.connection.address and not config.labgrid.place:
            raise UsageError(
                f"{config.name} is a kind of board and has no address",
                hint="a config of the board's own has one in [connection]; simulators: --sim N",
            )
        if config.name in found:
            raise UsageError(
                f"two boards are called {config.name}", hint="[board] name in their configs tells them apart"
            )
        folder = site.folder / "boards" / checked(config.name)
        found[config.name] = BoardEntry(config.name, config.path, folder, typed=typed)
    return list(found.values())


def make_simulators(site: HostInfo, count: int, faults: Iterable[str]) -> list[BoardEntry]:
    """So many simulated boards, ``HOST-sim-1`` and so on; their configs and stores stay in the host's folder."""
    model, posts = load_board(SIMULATOR), []
    for number in range(1, count + 1):
        name = f"{checked(site.host)}-sim-{number}"
        folder, socket = site.folder / "boards" / name, site.sockets / f"{number}.sock"
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "board.toml"
        config.write_text(sim_text(model, name, f"unix:{socket}"))
        arguments = ["--listen", f"unix:{socket}", "--store", str(folder / "store"), "--config", str(model.path)]
        arguments += ["--name", name, *(word for fault in faults for word in ("--fault", fault))]
        posts.append(BoardEntry(name, config, folder, tuple(arguments)))
    return posts


def sockets_for(folder: Path) -> Path:
    """A host's folder for sockets: always the same, so that none is left over; made, and nobody else's."""
    mark = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
    place = Path(tempfile.gettempdir()) / f"hil-farm-{os.getuid()}-{mark}"
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UsageError(f"{place} is another user's", hint="name another folder for such files: TMPDIR")
    return place


def _reachable() -> list[str]:
    """Names of the boards here that have an address, or a place in labgrid."""
    configs = {name: read_board(path) for name, path in known_boards().items()}
    return [name for name, one in configs.items() if one.connection.address or one.labgrid.place]


def checked(name: str) -> str:
    """A name that a board or host, and its folder, can have; else UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a name in a farm",
            hint="letters, digits, dots and dashes, a letter or digit first, at most 60",
        )
    return name


def lease_config(config: BoardConfig, address: str, fence: int, lease: str = "") -> BoardConfig:
    """The config with which a lease's job uses the board: without its power, which only a check may switch.

    A switch knows no fence: whoever wakes up after its lease is over would take the board from the next job. Nor is it
    labgrid's: its place is held already, by whoever has the board.
    """
    connection = replace(config.connection, address=address or config.connection.address, fence=fence, lease=lease)
    return replace(config, connection=connection, power=Power(), labgrid=Labgrid())


def public_text(config: BoardConfig) -> str:
    """The config as others may see it: without the way to the board, its keys and its power."""
    document = _document(config)
    for table in ("connection", "power"):
        document.pop(table, None)
    return tomlkit.dumps(document)


def sim_text(config: BoardConfig, name: str, address: str) -> str:
    """The config of a simulated board that its host starts, of the kind that ``config`` is."""
    document = _document(config)
    document["board"]["name"] = name
    document["connection"] = {"address": address}
    return tomlkit.dumps(document)


def _document(config: BoardConfig) -> dict[str, Any]:
    """The config's tables as they were read, with what else depends on its name and place."""
    document: dict[str, Any] = tomlkit.parse(config.text).unwrap()
    board = document.setdefault("board", {})
    board.update(name=config.name, hw_type=config.hw_type)
    document.pop("labgrid", None)  # its place is held already, by whoever has the board
    return document
