"""Board configs: one TOML file a kind of board, data only.

Looked for in this order: the path itself, ``$HIL_BOARDS``, ``./board_configs``, the user's ``hil/boards`` config
folder, and those that come with hil.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hil.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Connection:
    """Where the agent is reached: ``unix:PATH`` or ``HOST:PORT``; "" for a simulator, which is started.

    ``ca``, ``cert`` and ``key`` are PEM files, ``token_file`` holds the token; paths are relative to the config.
    """

    address: str = ""
    token_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True)
class Simulator:
    """A simulated device: most memory for a program (bytes, 0 is no limit), arithmetic ("" is exact), faults."""

    memory_limit: int = 0
    arithmetic: str = ""
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class BoardConfig:
    """A board config.

    Attributes:
        name: the board's.
        hw_type: kind of hardware; ``sim...`` for simulators.
        description: for people.
        runtime: the runtime to use when none is asked for.
        devices: runtime -> its device.
        compile_flags: compiler -> flags, the target's among them.
        labels: for selecting boards.
        connection: how it is reached.
        simulator: set for a simulator.
        path: the file it was read from.
    """

    name: str
    hw_type: str
    description: str = ""
    runtime: str = "iree"
    devices: Mapping[str, str] = field(default_factory=dict)
    compile_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    connection: Connection = Connection()
    simulator: Simulator = Simulator()
    path: Path = Path()

    @property
    def is_simulator(self) -> bool:
        """Whether hil starts this board itself."""
        return not self.connection.address


def folders() -> Iterator[Path]:
    """The folders that hold board configs, the first match wins."""
    if "HIL_BOARDS" in os.environ:
        yield Path(os.environ["HIL_BOARDS"])
    yield Path("board_configs")
    config_home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    yield Path(config_home) / "hil" / "boards"
    here = Path(__file__).resolve().parent
    yield here / "board_configs"
    yield here.parent / "board_configs"


def known_boards() -> dict[str, Path]:
    """Every board config that a name finds: name -> file."""
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else ():
            found.setdefault(path.stem, path)
    return found


def load_board(name: str) -> BoardConfig:
    """The config of a board's name or of a file.

    Raises:
        UsageError: there is none, or it is not a board config.
    """
    path = Path(name) if name.endswith(".toml") else known_boards().get(name)
    if path is None:
        raise UsageError(
            f"unknown board {name!r}", hint=f"one of {', '.join(known_boards())}; or an address: unix:PATH, HOST:PORT"
        )
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise UsageError(f"no such board config: {path}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return _parse(data, path)


def _parse(data: dict[str, Any], path: Path) -> BoardConfig:
    def table(name: str) -> dict[str, Any]:
        value = data.get(name, {})
        if not isinstance(value, dict):
            raise UsageError(f"{path}: [{name}] must be a table")
        return value

    for name in data.keys() - {"board", "devices", "compile_flags", "labels", "connection", "simulator"}:
        raise UsageError(f"{path}: unknown table [{name}]")
    board = table("board")
    board.setdefault("name", path.stem)
    board.setdefault("hw_type", path.stem)
    flags = {compiler: tuple(_strings(path, compiler, value)) for compiler, value in table("compile_flags").items()}
    simulator = dict(table("simulator"))
    if "faults" in simulator:
        simulator["faults"] = tuple(_strings(path, "faults", simulator["faults"]))
    connection: Connection = _make(Connection, table("connection"), path, "connection")
    made: BoardConfig = _make(
        BoardConfig,
        {
            **board,
            "devices": table("devices"),
            "compile_flags": flags,
            "labels": table("labels"),
            "connection": connection,
            "simulator": _make(Simulator, simulator, path, "simulator"),
            "path": path.resolve(),
        },
        path,
        "board",
    )
    if made.is_simulator and "simulator" not in data:
        raise UsageError(f"{path}: a board needs an address in [connection], or a [simulator] table")
    return made


def _make(kind: Any, values: dict[str, Any], path: Path, table: str) -> Any:
    allowed = {one.name: one for one in fields(kind)}
    for key, value in values.items():
        if key not in allowed:
            raise UsageError(f"{path}: [{table}] has no {key!r}", hint=f"it takes {', '.join(allowed)}")
        wanted = {"int": int, "str": str}.get(str(allowed[key].type))
        if wanted and (not isinstance(value, wanted) or isinstance(value, bool)):
            raise UsageError(f"{path}: [{table}] {key} must be {'text' if wanted is str else 'a number'}")
    return kind(**values)


def _strings(path: Path, name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"{path}: {name} must be a list of texts")
    return value
