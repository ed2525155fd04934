"""Boards of a host: discovery, settings for their workers, and configs that are safe to publish."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomlkit

from hil.controller.devices.power_control.provisioned_image import format_image
from hil.controller.farm.messages import MeterCard
from hil.controller.farm.paths import FarmAddress
from hil.controller.records.lab.board_image import ProvisionedImage
from hil.core.board_config import BoardConfig, Labgrid, MeasureCommands, Power, Recover
from hil.core.boards import list_boards, load_board, read_board
from hil.core.console_config import ConsoleConfig
from hil.core.meter_config import make_meter_table
from hil.core.stack_config import StackValue
from hil.core.variables import check_variables
from hil.errors import UsageError

SIMULATOR = "sim"
# Maximum characters of a version in a public config: clients limit the size of a config with up to 100 parts.
MAX_PUBLIC_VERSION = 300
_NAME = re.compile(r"\w[\w.-]{0,59}")


@dataclass(frozen=True)
class HostInfo:
    """Settings shared by the workers of a host."""

    host: str  # name, unique in the farm
    site: str
    farm: FarmAddress
    folder: Path  # private directory: job files, simulator stores, logs
    sockets: Path  # directory with a short path, required for Unix sockets
    boards: int = 1  # number of boards, which share the machine's cores
    allow_commands: bool = False  # True if users with the right may run commands on this machine

    @property
    def uplink(self) -> Path:
        """Socket of the uplink process, which has the connection to the farm."""
        return self.sockets / "uplink"

    @property
    def files(self) -> Path:
        """Cache of files from the farm's store."""
        return self.folder / "files"


def get_guard_path(site: HostInfo, lease: int) -> Path:
    """Return the socket that gives this host's processes access to a leased board."""
    return site.sockets / f"lease-{lease}.sock"


@dataclass(frozen=True)
class BoardEntry:
    """Board of a host."""

    name: str  # unique in the farm
    config: Path
    folder: Path  # private directory of the board
    simulator: tuple[str, ...] = ()  # arguments of `python -m hil.sim`, if the host starts the board
    typed: bool = True  # True if the config is trusted without the user's confirmation
    address: str = ""  # address of a simulator with a config of the user, which has no address

    def load(self) -> BoardConfig:
        """Read the config from disk."""
        config = load_board(str(self.config), typed=self.typed).config
        if not self.address:
            return config
        return replace(config, connection=replace(config.connection, address=self.address))


def find_boards(site: HostInfo, named: Sequence[str], faults: Iterable[str] = ()) -> list[BoardEntry]:
    """Return the boards given by name or config file; by default all configured boards with an address.

    The host starts a simulator for a user's config with ``[simulator]`` and no address.

    Args:
        faults: faults of the simulators, in addition to the configs'.
    """
    found: dict[str, BoardEntry] = {}
    for name in named or _find_reachable_boards():
        loaded = load_board(name)
        config = loaded.config
        starts = config.is_simulator and not config.labgrid.place and not loaded.is_shipped
        if not (config.connection.address or config.labgrid.place or starts):
            raise UsageError(
                f"{config.name} is a board type without an address",
                hint="write a config for the board with [connection] address or [simulator]; for simulators of type "
                "'sim', use --sim N",
            )
        if config.name in found:
            raise UsageError(f"duplicate board name {config.name}", hint="set a different [board] name in each config")
        folder = site.folder / "boards" / check_name(config.name)
        entry = BoardEntry(config.name, config.path, folder, typed=not loaded.is_foreign)
        if starts:
            address = f"unix:{site.sockets / f'board-{len(found)}.sock'}"
            arguments = _make_sim_arguments(entry, config.path, address, faults)
            entry = replace(entry, simulator=arguments, address=address)
        found[config.name] = entry
    if any(one.simulator for one in found.values()):
        check_variables()
    return list(found.values())


def make_simulators(site: HostInfo, count: int, faults: Iterable[str]) -> list[BoardEntry]:
    """Create simulated boards ``HOST-sim-1`` and so on. Their configs and stores are in the host's directory."""
    check_variables()  # the simulators would end again and again
    model, posts = load_board(SIMULATOR).config, []
    for number in range(1, count + 1):
        name = f"{check_name(site.host)}-sim-{number}"
        folder, socket = site.folder / "boards" / name, site.sockets / f"{number}.sock"
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "board.toml"
        config.write_text(format_sim_config(model, name, f"unix:{socket}"))
        post = BoardEntry(name, config, folder)
        posts.append(replace(post, simulator=_make_sim_arguments(post, model.path, f"unix:{socket}", faults)))
    return posts


def _make_sim_arguments(post: BoardEntry, config: Path, address: str, faults: Iterable[str]) -> tuple[str, ...]:
    """Return the arguments of ``python -m hil.sim`` for a board."""
    arguments = ["--listen", address, "--store", str(post.folder / "store"), "--config", str(config)]
    return (*arguments, "--name", post.name, *(word for fault in faults for word in ("--fault", fault)))


def make_socket_folder(folder: Path) -> Path:
    """Create a host's private directory for sockets. The path is stable, so that no old directory is left over."""
    mark = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
    place = Path(tempfile.gettempdir()) / f"hil-farm-{os.getuid()}-{mark}"
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UsageError(f"{place} belongs to a different user", hint="set TMPDIR to a different directory")
    return place


def _find_reachable_boards() -> list[str]:
    """Return the names of configured boards with an address or a labgrid place."""
    configs = {name: read_board(path).config for name, path in list_boards().items()}
    return [name for name, one in configs.items() if one.connection.address or one.labgrid.place]


def check_name(name: str) -> str:
    """Return a valid name of a board or host, which is also a directory name. Raises UsageError otherwise."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"invalid farm name {name!r}",
            hint="use at most 60 letters, digits, dots and dashes, with a letter or digit first",
        )
    return name


def lease_config(config: BoardConfig, address: str, fence: int, lease: str = "") -> BoardConfig:
    """Return the board config for a lease's job, without power control and ``[measure]``.

    A power switch does not check fences: a process that resumes after the lease would take the board from the next job.
    So only health checks may switch power. The returned config also has no labgrid table, because the worker already
    has the place. The commands of ``[measure]`` do not check fences either. A meter does not change the board,
    so the job uses it.
    """
    connection = replace(config.connection, address=address or config.connection.address, fence=fence, lease=lease)
    return replace(
        config,
        connection=connection,
        power=Power(),
        recover=Recover(),
        labgrid=Labgrid(),
        measure=MeasureCommands(),
    )


def format_leased_config(
    config: BoardConfig, address: str, fence: int, lease: str, image: ProvisionedImage | None = None
) -> str:
    """Return the config of :func:`lease_config` as TOML, for commands on the host.

    Args:
        image: image on the board; None if unknown.
    """
    document = _read_document(config)
    for table in ("power", "recover", "measure", "meter", "provision", "console", "access"):
        document.pop(table, None)
    if config.console.is_local:
        document["console"] = _make_console_table(config.console)
    if config.meter.is_set:
        document["meter"] = make_meter_table(config.meter)
    if config.stack:
        document["stack"] = {name: _make_stack_value(one) for name, one in config.stack.items()}
    document["connection"] = {"address": address, "fence": fence, "lease": lease, "image": format_image(image)}
    return tomlkit.dumps(document)


def _make_stack_value(value: StackValue) -> Any:
    """Return a value of ``[stack]`` for a config in another directory."""
    if value.command:
        return {"command": list(value.command)}
    return list(value.board) if value.board else value.text


def _make_console_table(console: ConsoleConfig) -> dict[str, Any]:
    """Return the table ``[console]`` for a config in another directory, with the console of a labgrid place."""
    values = {name: getattr(console, name) for name in ("serial", "address", "boot") if getattr(console, name)}
    values |= {"command": list(console.command)} if console.command else {}
    return {**values, "baud": console.baud, "boot_s": console.boot_s, "patterns": _list_pattern_tables(console)}


def _list_pattern_tables(console: ConsoleConfig) -> list[dict[str, str]]:
    return [{name: value for name, value in vars(one).items() if value} for one in console.patterns]


def format_public_console(config: BoardConfig) -> str:
    """Return the table ``[console]`` for the config of a lease, as TOML; "" if this host cannot read a console.

    The holder of the lease gets the lines through the farm.
    """
    return tomlkit.dumps({"patterns": _list_pattern_tables(config.console)}) if config.console.is_local else ""


def make_meter_card(config: BoardConfig) -> MeterCard | None:
    """Return the part of ``[meter]`` that the farm may know; None without a meter.

    A user's machine must not run the commands of another config, and cannot read the files of this host. So the card
    contains the settings only if the board's agent reads the meter.
    """
    meter = config.meter
    if not meter.is_set:
        return None
    if not config.has_board_meter:
        return MeterCard(kind=meter.kind)
    return MeterCard(
        kind=meter.kind,
        on_board=True,
        path=meter.path,
        channel=meter.channel,
        rate_hz=meter.rate_hz,
        idle_s=meter.idle_s,
    )


def format_public_config(config: BoardConfig, versions: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the config without connection, keys, and commands and settings of this host, as TOML.

    Args:
        versions: part of the stack -> output of its command.
    """
    document = _read_document(config)
    for table in ("connection", "power", "recover", "measure", "meter", "console", "provision", "access"):
        document.pop(table, None)
    # Commands would run on the user's machine.
    document.pop("stack", None)
    texts = {name: (one.text or versions.get(name, ""))[:MAX_PUBLIC_VERSION] for name, one in config.stack.items()}
    if known := {name: text for name, text in texts.items() if text}:
        document["stack"] = known
    return tomlkit.dumps(document)


def format_sim_config(config: BoardConfig, name: str, address: str) -> str:
    """Return the config of a simulated board of the same type as ``config``, as TOML."""
    document = _read_document(config)
    document["board"]["name"] = name
    document["connection"] = {"address": address}
    return tomlkit.dumps(document)


def _read_document(config: BoardConfig) -> dict[str, Any]:
    """Return the config's tables as read, with resolved name and hardware type."""
    document: dict[str, Any] = tomlkit.parse(config.text).unwrap()
    board = document.setdefault("board", {})
    board.update(name=config.name, hw_type=config.hw_type)
    document.pop("labgrid", None)  # the worker already has the place
    return document
