"""Find board configs, load them, and check the user's trust in them.

hil searches in this order: the path itself, configs shipped with hil, ``$HIL_BOARDS``, the user's ``hil/boards`` config
directory, directories of installed packages, and ``./board_configs``. Without the user's trust, a file from
``./board_configs`` may only describe a board (:mod:`hil.core.config_files`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hil.core.board_config import BoardConfig, Command
from hil.core.board_parser import read_config
from hil.core.config_files import check_trust, get_user_folder, state_of
from hil.core.digest import digest_of
from hil.core.files import digest_file
from hil.core.installed import list_entry_points
from hil.errors import UsageError, did_you_mean, format_expected

# Entry point group of packages with board configs. The value is a package, whose directory contains the files.
_GROUP = "hil.board_configs"
# Prefixes of addresses. A board config with such a name would be ambiguous.
RESERVED_NAMES = {"farm", "local", "ssh", "unix"}
# Directory with the board configs of a project.
BOARDS_FOLDER = "board_configs"


@dataclass(frozen=True)
class LoadedBoard:
    """Board config with its origin and the user's trust in it.

    Attributes:
        path: path of the config file, unresolved. :attr:`BoardConfig.path` is the resolved path.
        is_foreign: True if the author may be neither the user nor hil. Such a file needs trust.
    """

    config: BoardConfig
    path: Path
    is_foreign: bool

    @cached_property
    def digest(self) -> str:
        """Digest of the config's text and of the local programs and C files that the config names by path.

        The user's trust applies to this digest. The digest is "" if such a program cannot be read. Such a config is
        never trusted.
        """
        config, measure = self.config, self.config.measure
        programs = [config.path.parent / Path(config.command.file).expanduser()] if config.command.file else []
        for hook in (*config.power.hooks.values(), *config.recover.steps, *measure.before, *measure.after):
            if isinstance(hook, Command) and "/" in hook.argv[0]:
                programs.append(Path(hook.argv[0]))
        commands = [config.console.command, config.provision.command, config.meter.command]
        commands += [one.command or one.board for one in config.stack.values()]
        if config.mcu is not None:
            commands += [config.mcu.flash, config.mcu.reset, (config.mcu.uart,)]
        programs += [Path(argv[0]) for argv in commands if argv and "/" in argv[0]]
        try:
            digests = [digest_file(path) for path in programs]
        except (OSError, RuntimeError):  # RuntimeError: unknown user in ~user
            return ""
        return digest_of("\0".join([config.text, *digests]).encode())

    @property
    def is_trusted(self) -> bool:
        """True if the config needs no trust, or the user trusts it in its current state.

        Raises:
            UsageError: the list of trusted files is damaged, or other users may write to it.
        """
        config = self.config
        return not (self.is_foreign and config.asks) or state_of(config.path, self.digest) == "trusted"

    @property
    def is_shipped(self) -> bool:
        """True if the config is included with hil."""
        return _is_in(self.path, _own_folder())

    @property
    def is_harmless(self) -> bool:
        """True if anyone may select the board: a config of hil, or a simulator without settings that need trust."""
        return self.is_shipped or (self.config.is_simulator and not self.config.asks)


def load_board(name: str, *, typed: bool = True, others: Callable[[], Iterable[str]] = lambda: ()) -> LoadedBoard:
    """Load a board config by board name or file path, and check that the user trusts it.

    Args:
        typed: True if the user typed the name in this command. A typed path is trusted; other paths need trust
            like named boards.
        others: returns other names that the user may have meant, for the hint.

    Raises:
        UsageError: the config is missing, invalid, or not trusted.
    """
    path = find_board(name, others)
    board = LoadedBoard(read_config(path), path, not (typed and is_file(name)) and not _is_trusted_place(path))
    if board.is_foreign:
        check_trust(board.config.path, board.digest, board.config.asks, f"--board {path}")
    return board


def read_board(path: Path) -> LoadedBoard:
    """Read a config file without a trust check, for display only.

    Raises:
        UsageError: the file is missing or not a board config.
    """
    return LoadedBoard(read_config(path), path, not _is_trusted_place(path))


def list_boards() -> dict[str, Path]:
    """Return all named board configs: name -> file."""
    found: dict[str, Path] = {}
    for folder in _iter_folders():
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else ():
            if path.stem not in RESERVED_NAMES:
                found.setdefault(path.stem, path)
    return found


def is_file(name: str) -> bool:
    """Return True if the text is a config file path rather than a board name."""
    return name.endswith(".toml")


def find_board(name: str, others: Callable[[], Iterable[str]] = lambda: ()) -> Path:
    """Return the config file for a board name or path. Raises UsageError for an unknown board.

    Args:
        others: see :func:`load_board`.
    """
    if is_file(name):
        return Path(name)
    known = list_boards()
    if name not in known:
        is_near = any(path.stem == name for path in Path().glob("*.toml"))
        near = f"did you mean '{name}.toml'? " if is_near else did_you_mean(name, [*known, *others()])
        names = near + format_expected(known)
        raise UsageError(
            f"unknown board {name!r}",
            hint=f"{names}{names and '; or '}USER@HOST, ssh:ALIAS, unix:PATH, HOST:PORT, farm:SELECTOR",
        )
    return known[name]


def _iter_folders() -> Iterator[Path]:
    """Yield the directories with board configs, in search order.

    hil's directory is first, so its board names take precedence.
    """
    yield _own_folder()
    if named := os.environ.get("HIL_BOARDS"):
        yield Path(named)
    if user := get_user_folder():
        yield user / "boards"
    yield from _list_package_folders()
    yield Path(BOARDS_FOLDER)


def _list_package_folders() -> list[Path]:
    """Return the directories of installed packages with board configs. Imports no package."""
    found = []
    for point in list_entry_points(_GROUP):
        package, *parts = point.value.split(".")
        try:
            spec = importlib.util.find_spec(package)
        except ValueError:  # an invalid name
            continue
        places = spec.submodule_search_locations if spec is not None else None
        found += [Path(place, *parts) for place in places or ()]
    return found


def _own_folder() -> Path:
    """Return the directory with hil's board configs: in the package, or next to it in a checkout."""
    here = Path(__file__).resolve().parents[1]
    inside = here / BOARDS_FOLDER
    return inside if inside.is_dir() else here.parent / BOARDS_FOLDER


def _is_trusted_place(path: Path) -> bool:
    """Return True if only the user, hil or an installed package writes to the directory, so that it needs no trust.

    A relative ``HIL_BOARDS`` is not trusted, because it depends on the working directory.
    """
    named, user = os.environ.get("HIL_BOARDS", ""), get_user_folder()
    places = [
        _own_folder(),
        *([Path(named)] if Path(named).is_absolute() else ()),
        *([user / "boards"] if user else ()),
        *_list_package_folders(),
    ]
    return any(_is_in(path, place) for place in places)


def _is_in(path: Path, folder: Path) -> bool:
    return path.parent.absolute() == folder.absolute() or _is_same_file(path.parent, folder)


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
