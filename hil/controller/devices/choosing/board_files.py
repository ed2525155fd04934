"""Create, rename and remove board configs in the user's config directory."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit

from hil.controller.devices.choosing.board_resolver import GENERIC, is_address
from hil.controller.devices.ssh.aliases import list_aliases
from hil.core.board_config import BoardConfig
from hil.core.board_parser import parse_board, read_config
from hil.core.boards import RESERVED_NAMES, list_boards, load_board
from hil.core.config_files import get_user_folder
from hil.core.files import write_atomic
from hil.errors import StorageError, UsageError, did_you_mean, format_expected

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_BYTES = re.compile(r"([0-9]{1,15})(KiB|MiB|GiB)?")
_MEMORY = "memory_limit"
# Settings of a config that contain paths relative to the config.
_WITH_PATHS = ("power", "recover", "measure", "meter")


@dataclass(frozen=True)
class NewBoard:
    """Board to add.

    Attributes:
        address: An address, a host of the ssh config, or a simulator: ``sim``, ``sim-f16:memory_limit=64MiB``.
        hw_type: Board type with the settings of the new board; "" is ``generic``.
        connection: Further keys of [connection]. Paths are absolute.
        faults: Faults of a simulator.
    """

    name: str
    address: str
    hw_type: str = ""
    runtime: str = ""
    description: str = ""
    connection: Mapping[str, Any] = field(default_factory=dict)
    faults: Sequence[str] = ()


def make_board_config(board: NewBoard) -> BoardConfig:
    """Return the config of a new board. The attribute ``text`` is the file's content.

    Raises:
        UsageError: the name, address, type or a setting is invalid, or the board exists.
    """
    folder = _get_folder()
    _check_new_name(board.name, folder)
    address = board.address
    simulator = _split_simulator(address)
    if simulator is None and not is_address(address):
        if address not in list_aliases():
            hint = did_you_mean(address, [*list_aliases(), *_list_simulators()])
            hint += "expected USER@HOST, a host of ~/.ssh/config, unix:PATH, HOST:PORT, farm:SELECTOR, or a simulator: "
            raise UsageError(f"invalid address {address!r}", hint=hint + ", ".join(_list_simulators()))
        address = f"ssh:{address}"
    if simulator is not None and board.hw_type:
        raise UsageError(f"--runtime-hw-type cannot be given for the simulator {address}", hint="remove the option")
    if simulator is not None and board.connection:
        raise UsageError(f"a simulator has no connection, got {next(iter(board.connection))}", hint="remove the option")
    if board.faults and simulator is None:
        raise UsageError("--fault requires a simulator", hint="remove --fault, or use the address sim")
    kind = simulator[0] if simulator else board.hw_type or GENERIC
    base = load_board(kind).config
    document = tomlkit.parse(base.text)
    table = document.setdefault("board", tomlkit.table())
    table.pop("name", None)
    table.pop("description", None)
    table["hw_type"] = base.hw_type
    for key, value in (("description", board.description), ("runtime", board.runtime)):
        if value:
            table[key] = value
    if simulator is None:
        _check_type(base)
        connection = document.setdefault("connection", tomlkit.table())
        connection.update({"address": address, **board.connection})
    else:
        document["simulator"].update({**simulator[1], **({"faults": list(board.faults)} if board.faults else {})})
    # A comment at the start describes the type, not the board.
    text = re.sub(r"\A(#.*\n|\s*\n)+", "", tomlkit.dumps(document))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("an option contains invalid UTF-8", hint="use valid UTF-8 in texts and paths") from error
    config = parse_board(text, folder / f"{board.name}.toml")
    if simulator is None and any(getattr(config, key) != getattr(base, key) for key in _WITH_PATHS):
        raise _make_path_error(base)
    return config


def add_board_file(config: BoardConfig) -> Path:
    """Write the config of a new board. Raises UsageError if the board exists."""
    path = _get_folder() / f"{config.path.stem}.toml"
    _create(path, config.text)
    return path


def find_board_file(name: str) -> Path:
    """Return the config of a board in the user's config directory.

    Raises:
        UsageError: there is no such config, or it is in another directory.
    """
    folder = _get_folder()
    path = folder / f"{name}.toml"
    if _NAME.fullmatch(name) and path.is_file():
        return path
    known = sorted(one.stem for one in folder.glob("*.toml"))
    hint = f"{did_you_mean(name, known)}{format_expected(known, 'boards that hil can change: ')}"
    if other := list_boards().get(name):
        raise UsageError(f"cannot change board {name}: its config is {other}, not in {folder}", hint=hint)
    if name in list_aliases():
        raise UsageError(f"cannot change board {name}: it is a host of ~/.ssh/config, without a config", hint=hint)
    raise UsageError(f"unknown board {name!r}", hint=hint or f"no board config in {folder}")


def remove_board_file(name: str) -> Path:
    """Delete the config of a board. Return the path. Raises the errors of :func:`find_board_file`."""
    path = find_board_file(name)
    try:
        path.unlink()
    except OSError as error:
        raise StorageError(f"cannot delete {path}: {error.strerror or error}") from error
    return path


def rename_board_file(old: str, new: str) -> Path:
    """Rename a board. The hardware type and all other settings stay the same. Return the new path.

    Raises:
        UsageError: the old board does not exist (:func:`find_board_file`), or the new name is invalid or in use.
    """
    path = find_board_file(old)
    _check_new_name(new, path.parent)
    before = read_config(path)
    document = tomlkit.parse(before.text)
    table = document.setdefault("board", tomlkit.table())
    # Without these keys, the config uses the name of the file.
    table["hw_type"] = before.hw_type
    if "name" in table:
        table["name"] = new
    target = path.with_name(f"{new}.toml")
    _create(target, tomlkit.dumps(document))
    remove_board_file(old)
    return target


def _get_folder() -> Path:
    if folder := get_user_folder():
        return folder / "boards"
    raise UsageError("missing home directory for board configs", hint="set HOME or XDG_CONFIG_HOME")


def _check_new_name(name: str, folder: Path) -> None:
    """Raise UsageError if a board cannot have this name."""
    if not _NAME.fullmatch(name) or name.endswith(".toml") or name in RESERVED_NAMES or is_address(name):
        raise UsageError(
            f"invalid board name {name!r}",
            hint="use at most 60 letters, digits, dots, dashes and underscores, with a letter or digit first; "
            f"reserved: {', '.join(sorted(RESERVED_NAMES))}",
        )
    path = folder / f"{name}.toml"
    other = list_boards().get(name)
    if path.exists() or path.is_symlink():
        raise UsageError(f"board {name} already exists: {path}", hint=f"hil board remove {name}, or use another name")
    # A config in the working directory has lower precedence than the new config.
    if other and other.parent.absolute() != Path("board_configs").absolute():
        raise UsageError(f"board {name} already exists: {other}", hint="use another name")


def _list_simulators() -> list[str]:
    """Return the simulators of hil: ``sim``, ``sim-f16``, ..."""
    named = {name: path for name, path in list_boards().items() if name == "sim" or name.startswith("sim-")}
    return sorted(name for name, path in named.items() if _is_simulator(path))


def _is_simulator(path: Path) -> bool:
    try:
        return read_config(path).is_simulator
    except UsageError:
        return False


def _split_simulator(address: str) -> tuple[str, dict[str, Any]] | None:
    """Return the type and the settings of a simulator; None for another address."""
    name, _, text = address.partition(":")
    if name not in _list_simulators():
        return None
    settings: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key != _MEMORY:
            hint = "other arithmetics: use the simulators sim-f16, sim-bf16 and sim-int8; faults: use --fault"
            raise UsageError(
                f"unknown setting {key!r} of the simulator {name}",
                hint=f"{did_you_mean(key, [_MEMORY])}expected {name}:{_MEMORY}=64MiB; {hint}",
            )
        if not (size := _BYTES.fullmatch(value)):
            raise UsageError(f"invalid {_MEMORY} {value!r}", hint=f"for example {name}:{_MEMORY}=64MiB")
        settings[key] = int(size[1]) * _UNITS[size[2] or ""]
    return name, settings


def _check_type(base: BoardConfig) -> None:
    """Raise UsageError if a config is not a board type whose settings hil can copy."""
    connection = base.connection
    if connection.address or base.is_simulator:
        what = "a simulator" if base.is_simulator else f"a board with the address {connection.address}"
        raise UsageError(
            f"{base.name} is {what}, not a board type", hint="use a config without an address, such as generic"
        )
    files = (base.command.file, *(getattr(connection, key) for key in PATH_KEYS))
    if any(file and not Path(file).expanduser().is_absolute() for file in files):
        raise _make_path_error(base)


def _make_path_error(base: BoardConfig) -> UsageError:
    return UsageError(
        f"cannot copy the settings of {base.name}: {base.path} contains relative paths",
        hint="use absolute paths, or copy the file",
    )


# Keys of [connection] with a path.
PATH_KEYS = ("identity", "known_hosts", "token_file", "ca", "cert", "key")


def _create(path: Path, text: str) -> None:
    """Write a new config atomically. Raises UsageError if the file exists."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(temporary, text, mode=0o600)
        try:
            # Unlike a rename, a link never replaces a file that another process has just created.
            path.hardlink_to(temporary)
        except FileExistsError as error:
            raise UsageError(f"board {path.stem} already exists: {path}", hint="use another name") from error
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
