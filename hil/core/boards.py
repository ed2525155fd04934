"""Board configs: one TOML file a kind of board.

A config is looked for in this order: the path itself, those that come with hil, ``$HIL_BOARDS``, the user's
``hil/boards`` config folder, and ``./board_configs``, of which only what the user trusts may do more than describe a
board (:mod:`hil.core.config_files`).

``[power]`` says what resets a board and switches its power. Each action (``reset``, ``off``, ``on``, ``cycle``) is one
of three, and none goes through a shell::

    [power]
    reset = ["usbrelay", "BOARD_1=1"]                            # a program and its arguments
    cycle = "labgrid-client -p rpi5 power cycle"                 # one line, split as labgrid splits it
    off = { url = "http://pdu.lab/outlet/3/off" }                # HTTP (USER:PASSWORD@ too); also method, headers, body
    boot_s = 60                                                  # seconds until the board answers again

The keys of labgrid's ExternalPowerDriver (``cmd_on``, ``cmd_off``, ``cmd_cycle``, ``delay``) are taken as they are.

``[runtime]`` says how programs are run on a board that has no agent: with ``kind = "command"`` through SSH, by
``iree-run-module``, a vendor's fork of it, or any program that reads and writes files. The command is a list of
arguments, never a line for a shell.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hil.core.arithmetic import check_arithmetic
from hil.core.board_config import (
    ACTIONS,
    PLACEHOLDER,
    BoardConfig,
    Command,
    Connection,
    Http,
    Labgrid,
    Power,
    RuntimeCommand,
    Simulator,
)
from hil.core.config_files import asks_for, check_trust, parse_toml, user_folder
from hil.core.digest import digest_file, digest_of
from hil.core.files import read_file
from hil.core.runtimes import RUNTIMES
from hil.errors import UsageError, did_you_mean, one_of

_TEXTS = "tuple[str, ...]"
# A field's type as its dataclass writes it -> whether a TOML value fits, and what it must be.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: type(value) is int, "a number"),
    "str": (lambda value: isinstance(value, str), "text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    _TEXTS: (
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value),
        "a list of texts",
    ),
    "Mapping[str, str]": (
        lambda value: isinstance(value, dict) and all(isinstance(one, str) for one in value.values()),
        "a table of texts",
    ),
}
_BOARD = ("name", "hw_type", "description", "runtime", "arithmetic")
# In [devices], those of hil's runtimes that the table does not name.
_OTHERS = "*"
_TABLES = {
    "board",
    "arithmetic",
    "devices",
    "compile_flags",
    "labels",
    "connection",
    "runtime",
    "power",
    "simulator",
    "labgrid",
}
# Words that addresses begin with: a file of such a name would be taken for what the word means.
_NO_NAMES = {"farm", "local", "ssh", "unix"}
_MOST_TEXT = 1 << 20
# Longer nobody waits for a board.
_DAY_S = 86400.0
KINDS = ("agent", "command")
TENSORS = ("auto", "bin", "npy")
# What a placeholder may be, where; those of "flags" that stand for several arguments have to be a whole flag.
_SEVERAL = ("inputs", "outputs", "parameters")
_PLACEHOLDERS = {
    "flags": ("device", "module", "function", "folder", *_SEVERAL),
    "input": ("value", "type", "file"),
    "output": ("file",),
    "parameter": ("scope", "file"),
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def folders() -> Iterator[Path]:
    """The folders that hold board configs, the first match wins: a name of hil's own is always hil's own."""
    yield own_folder()
    if named := os.environ.get("HIL_BOARDS"):
        yield Path(named)
    if user := user_folder():
        yield user / "boards"
    yield Path("board_configs")


def own_folder() -> Path:
    """The folder of those that come with hil: inside the package, in a checkout beside it."""
    here = Path(__file__).resolve().parents[1]
    inside = here / "board_configs"
    return inside if inside.is_dir() else here.parent / "board_configs"


def is_trusted_place(path: Path) -> bool:
    """Whether a config's file lies where only the user or hil puts one, and so needs no word of the user's.

    A relative ``HIL_BOARDS`` is another folder in every working directory, and counts as that.
    """
    named, user = os.environ.get("HIL_BOARDS", ""), user_folder()
    places = [own_folder(), *([Path(named)] if Path(named).is_absolute() else ()), *([user / "boards"] if user else ())]
    return any(path.parent.absolute() == place.absolute() or _same(path.parent, place) for place in places)


def known_boards() -> dict[str, Path]:
    """Every board config that a name finds: name -> file."""
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else ():
            if path.stem not in _NO_NAMES:
                found.setdefault(path.stem, path)
    return found


def load_board(name: str, *, typed: bool = True) -> BoardConfig:
    """The config of a board's name or of a file.

    Args:
        typed: whether the user named it here and now: a file that they typed is trusted, any other one is as one that
            its name found.

    Raises:
        UsageError: there is none, it is not a board config, or the user has not trusted it.
    """
    path = find_board(name)
    config = read_board(path)
    if not (typed and is_file(name)) and not is_trusted_place(path):
        check_trust(config.path, trust_digest(config), config.asks, f"--board {path}")
    return config


def is_file(name: str) -> bool:
    """Whether a text names a config's file and not a board."""
    return name.endswith(".toml")


def find_board(name: str) -> Path:
    """The file of a board's name; a file itself. Raises UsageError: no board is called so."""
    if is_file(name):
        return Path(name)
    known = known_boards()
    if name not in known:
        names = did_you_mean(name, known) + one_of(known)
        raise UsageError(
            f"unknown board {name!r}",
            hint=f"{names}{names and '; or '}USER@HOST, ssh:ALIAS, unix:PATH, HOST:PORT, farm:SELECTOR",
        )
    return known[name]


def read_board(path: Path) -> BoardConfig:
    """The config that a file holds, whether it is trusted or not: to be shown, and not to be used.

    Raises:
        UsageError: there is no such file, or it is not a board config.
    """
    try:
        text = read_file(path, _MOST_TEXT).decode()
    except FileNotFoundError as error:
        raise UsageError(f"no such board config: {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return parse_board(text, path)


def trust_digest(config: BoardConfig) -> str:
    """The digest that a config is trusted by: of its text, and of the programs here that it names by their path.

    "" where such a program cannot be read: what is not there is not trusted.
    """
    programs = [config.path.parent / Path(config.command.file).expanduser()] if config.command.file else []
    for hook in config.power.hooks.values():
        if isinstance(hook, Command) and "/" in hook.argv[0]:
            programs.append(Path(hook.argv[0]))
    try:
        digests = [digest_file(path) for path in programs]
    except (OSError, RuntimeError):  # or the home of a user that there is not
        return ""
    return digest_of("\0".join([config.text, *digests]).encode())


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def parse_board(text: str, path: Path) -> BoardConfig:
    """The board config that a text is.

    Args:
        path: the file that it is from, or would be: its name is the board's where the text tells none.

    Raises:
        UsageError: it is not a board config.
    """
    data = parse_toml(text, path)

    def table(name: str) -> dict[str, Any]:
        value = data.get(name, {})
        if not isinstance(value, dict):
            raise UsageError(f"{path}: [{name}] must be a table")
        return value

    for name in data.keys() - _TABLES:
        raise UsageError(f"{path}: unknown table [{name}]")
    board = table("board")
    for name in board.keys() - _BOARD:
        raise UsageError(f"{path}: [board] has no {name!r}", hint=f"it takes {', '.join(_BOARD)}")
    board = {"name": path.stem, "hw_type": path.stem, **board}
    devices = _typed(table("devices"), "Mapping[str, str]", f"{path}: [devices]")
    if (own_choice := devices.get(_OTHERS)) is not None:
        devices = {name: device for name, device in devices.items() if name != _OTHERS}
        devices |= {name: own_choice for name in RUNTIMES if name not in devices}
    arithmetics = _typed(table("arithmetic"), "Mapping[str, str]", f"{path}: [arithmetic]")
    simulator = _make(Simulator, table("simulator"), f"{path}: [simulator]") if "simulator" in data else None
    check_arithmetic(str(board.get("arithmetic", "")), f"{path}: [board] arithmetic")
    check_arithmetic(simulator.arithmetic if simulator else "", f"{path}: [simulator] arithmetic")
    for runtime, name in arithmetics.items():
        check_arithmetic(name, f"{path}: [arithmetic] {runtime}")
    flags = {
        compiler: _typed(value, _TEXTS, f"{path}: [compile_flags] {compiler}")
        for compiler, value in table("compile_flags").items()
    }
    connection: Connection = _make(Connection, table("connection"), f"{path}: [connection]")
    if not 0 <= connection.fence < 1 << 63:
        raise UsageError(f"{path}: [connection] fence must be a whole number of at least 0")
    made: BoardConfig = _make(
        BoardConfig,
        {
            **board,
            "arithmetics": arithmetics,
            "devices": devices,
            "compile_flags": flags,
            "labels": table("labels"),
            "connection": connection,
            "command": parse_runtime(table("runtime"), path),
            "power": parse_power(table("power"), path),
            "simulator": simulator,
            "labgrid": _make(Labgrid, table("labgrid"), f"{path}: [labgrid]"),
            "path": path.resolve(),
            "text": text,
            "asks": tuple(asks_for(data)),
        },
        f"{path}: [board]",
    )
    return made


def _make(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    """A dataclass of a table's values, each of its field's type."""
    allowed = {one.name: str(one.type) for one in fields(kind)}
    for key in values:
        if key not in allowed:
            raise UsageError(f"{where} has no {key!r}", hint=f"it takes {', '.join(allowed)}")
    return kind(**{key: _typed(value, allowed[key], f"{where} {key}") for key, value in values.items()})


def _typed(value: Any, kind: str, where: str) -> Any:
    """A TOML value as a type; of a type that is not in the table it is taken as it is."""
    fits, called = _TYPES.get(kind, (lambda value: True, ""))
    if not fits(value):
        raise UsageError(f"{where} must be {called}")
    texts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(text, str) and "\0" in text for text in texts):
        raise UsageError(f"{where} holds a character that no name or argument can")
    return tuple(value) if kind == _TEXTS else value


def parse_power(table: Mapping[str, Any], where: Path) -> Power:
    """The ``[power]`` table, as it is read from TOML.

    Args:
        where: its file. A program that is named by a relative path lies beside it, and never in the folder that hil
            happens to be called in.

    Raises:
        UsageError: it has another key or type than these.
    """
    hooks: dict[str, Command | Http] = {}
    seconds: dict[str, float] = {}
    for key, value in table.items():
        action = key.removeprefix("cmd_")
        if key in ("delay", "boot_s", "timeout_s"):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _DAY_S:
                raise UsageError(f"{where}: [power] {key} must be a number of seconds, a day of them at most")
            seconds[key] = float(value)
        elif action in ACTIONS and action not in hooks:
            hooks[action] = _hook(value, f"{where}: [power] {key}", where.absolute().parent)
        elif action in ACTIONS:
            raise UsageError(
                f"{where}: [power] has {action!r} twice", hint=f"leave out one of {action} and cmd_{action}"
            )
        else:
            takes = ", ".join((*ACTIONS, *Power.__dataclass_fields__))
            raise UsageError(f"{where}: [power] has no {key!r}", hint=f"it takes {takes.replace('hooks, ', '')}")
    return Power(hooks, **seconds)


def _hook(value: Any, where: str, folder: Path) -> Command | Http:
    if isinstance(value, dict):
        if not str(value.get("url", "")).startswith(("http://", "https://")):
            raise UsageError(f"{where}: url must begin with http:// or https://")
        made: Http = _make(Http, value, f"{where}:")
        return made
    try:
        argv = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UsageError(f"{where} cannot be split into words: {error}") from error
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise UsageError(f"{where} must be a command (a list of texts, or one line) or a table with a url")
    argv = _typed(argv, _TEXTS, where)
    program = str(folder / argv[0]) if "/" in argv[0] else argv[0]
    return Command((program, *argv[1:]))


def parse_runtime(values: Mapping[str, Any], path: Path) -> RuntimeCommand:
    """The ``[runtime]`` table of a board config. Raises UsageError: a key, value or placeholder is unknown."""
    where = f"{path}: [runtime]"
    runtime: RuntimeCommand = _make(RuntimeCommand, values, where)
    for name in runtime.environment:
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"{where} environment has a variable {name!r} that cannot be")
    for key, known in _PLACEHOLDERS.items():
        texts = getattr(runtime, key)
        for text in texts if isinstance(texts, tuple) else [texts]:
            _check_placeholders(where, key, known, text)
    for key, allowed in (("kind", KINDS), ("tensors", TENSORS)):
        if getattr(runtime, key) not in allowed:
            raise UsageError(f"{where} {key} is {getattr(runtime, key)!r}", hint=f"one of {', '.join(allowed)}")
    if runtime.program and runtime.file:
        raise UsageError(
            f"{where} names both a program on the board and a file to put there", hint="leave one of them out"
        )
    if "/" in runtime.program and not runtime.program.startswith("/"):
        raise UsageError(f"{where} program {runtime.program!r} must be a name or an absolute path on the board")
    return runtime


def _check_placeholders(where: str, key: str, known: Sequence[str], text: str) -> None:
    for name in PLACEHOLDER.findall(text):
        if name not in known:
            raise UsageError(
                f"{where} {key} has no {{{name}}}", hint=f"it has {', '.join(f'{{{one}}}' for one in known)}"
            )
        if name in _SEVERAL and text != f"{{{name}}}":
            raise UsageError(f"{where} {{{name}}} stands for several arguments: it must be a flag of its own")
