"""Parse board configs from TOML text.

``[power]`` defines how to reset a board and switch its power. Each action (``reset``, ``off``, ``on``, ``cycle``) has a
hook in one of the forms below. Hooks never use a shell::

    [power]
    reset = ["usbrelay", "BOARD_1=1"]                            # a program and the arguments
    cycle = "labgrid-client -p rpi5 power cycle"                 # one line, split like a shell command
    off = { url = "http://pdu.lab/outlet/3/off" }                # HTTP (USER:PASSWORD@ too); also method, headers, body
    boot_s = 60                                                  # boot timeout in seconds

The keys from labgrid's ExternalPowerDriver (``cmd_on``, ``cmd_off``, ``cmd_cycle``, ``delay``) also work.

``[measure]`` has commands to run before and after a measurement, in the forms of ``[recover]``, or as a line::

    [measure]
    before = [{ board = ["cpupower", "frequency-set", "-g", "performance"] }, "fan-control --speed 100"]

``[runtime]`` defines how to run programs on a board without an agent. With ``kind = "command"``, hil uses
SSH to run ``iree-run-module``, a vendor's fork, or any program that reads and writes files. The command is
a list of arguments, never a shell line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.core.arithmetic import add_arithmetic_flags, check_arithmetic
from hil.core.board_config import (
    ACTIONS,
    MAX_ICOUNT_SHIFT,
    PLACEHOLDER,
    RUNTIME_KINDS,
    TENSOR_FORMATS,
    AccessList,
    BoardCommand,
    BoardConfig,
    Command,
    Connection,
    Http,
    Labgrid,
    MeasureCommands,
    Power,
    Recover,
    RuntimeCommand,
    Simulator,
)
from hil.core.chips import format_flags
from hil.core.config_files import list_trusted_settings, parse_toml
from hil.core.config_keys import list_keys
from hil.core.config_values import MAX_SECONDS, TEXTS, check_type, make_values, parse_timeout, parse_words, reject_key
from hil.core.console_config import parse_console, parse_provision
from hil.core.files import read_file, suggest_path
from hil.core.mcu_config import MCU_RUNTIME, parse_mcu
from hil.core.meter_config import parse_meter
from hil.core.peak_config import parse_peak
from hil.core.runtimes import list_known_runtimes
from hil.core.stack_config import parse_stack
from hil.errors import UsageError, did_you_mean

# Keys of [board]. The other fields of BoardConfig are tables.
BOARD_KEYS = ("name", "hw_type", "description", "runtime", "arithmetic", "icount_shift")
# Key in [devices] for all runtimes of hil that the table does not name.
_OTHERS = "*"
BOARD_TABLES = {
    "board",
    "arithmetic",
    "devices",
    "compile_flags",
    "labels",
    "access",
    "connection",
    "runtime",
    "power",
    "recover",
    "measure",
    "meter",
    "peak",
    "console",
    "provision",
    "stack",
    "simulator",
    "labgrid",
    "mcu",
}
_MAX_TEXT = 1 << 20
# Maximum characters in the name of a user or a group.
_MAX_NAME = 100
# Placeholders allowed in each setting. In "flags", placeholders that expand to multiple arguments must be a whole flag.
_SEVERAL = ("inputs", "outputs", "parameters")
_PLACEHOLDERS = {
    "flags": ("device", "module", "function", "folder", *_SEVERAL),
    "input": ("value", "type", "file"),
    "output": ("file",),
    "parameter": ("scope", "file"),
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _parse_access(table: dict[str, Any], place: str) -> AccessList:
    found: AccessList = make_values(AccessList, table, place)
    for name in (*found.users, *found.groups):
        if not name or not name.isprintable() or len(name) > _MAX_NAME:
            raise UsageError(f"{place}: invalid name {name[:50]!r}", hint=f"use 1 to {_MAX_NAME} printable characters")
    if table and not (found.users or found.groups):
        raise UsageError(
            f"{place} has no users and no groups", hint='add users = ["NAME"] or groups = ["NAME"], or remove the table'
        )
    return found


def read_config(path: Path) -> BoardConfig:
    """Read and parse a board config file.

    Raises:
        UsageError: the file is missing or not a board config.
    """
    try:
        text = read_file(path, _MAX_TEXT).decode()
    except FileNotFoundError as error:
        raise UsageError(f"board config not found: {path}", hint=suggest_path(path).rstrip()) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return parse_board(text, path)


def parse_board(text: str, path: Path) -> BoardConfig:
    """Parse the text of a board config.

    Args:
        path: the text's file. Its stem is the default board name.

    Raises:
        UsageError: the text is not a board config.
    """
    data = parse_toml(text, path)

    def get_table(name: str) -> dict[str, Any]:
        value = data.get(name, {})
        if not isinstance(value, dict):
            raise UsageError(f"{path}: [{name}] must be a table")
        return value

    for name in data.keys() - BOARD_TABLES:
        hint = f"{did_you_mean(name, BOARD_TABLES)}known tables: {', '.join(sorted(BOARD_TABLES))}"
        raise UsageError(f"{path}: unknown table [{name}]", hint=hint)
    board = get_table("board")
    for name in board.keys() - set(BOARD_KEYS):
        reject_key(f"{path}: [board]", name, BOARD_KEYS)
    board = {"name": path.stem, "hw_type": path.stem, **board}
    devices = check_type(get_table("devices"), "Mapping[str, str]", f"{path}: [devices]")
    if (own_choice := devices.get(_OTHERS)) is not None:
        devices = {name: device for name, device in devices.items() if name != _OTHERS}
        devices |= {name: own_choice for name in list_known_runtimes() if name not in devices}
    arithmetics = check_type(get_table("arithmetic"), "Mapping[str, str]", f"{path}: [arithmetic]")
    simulator = make_values(Simulator, get_table("simulator"), f"{path}: [simulator]") if "simulator" in data else None
    if (shift := board.get("icount_shift", 0)) not in range(MAX_ICOUNT_SHIFT + 1) or isinstance(shift, (bool, float)):
        raise UsageError(f"{path}: [board] icount_shift must be a whole number from 0 to {MAX_ICOUNT_SHIFT}")
    check_arithmetic(str(board.get("arithmetic", "")), f"{path}: [board] arithmetic")
    check_arithmetic(simulator.arithmetic if simulator else "", f"{path}: [simulator] arithmetic")
    for runtime, name in arithmetics.items():
        check_arithmetic(name, f"{path}: [arithmetic] {runtime}")
    flags = {
        compiler: check_type(value, TEXTS, f"{path}: [compile_flags] {compiler}")
        for compiler, value in get_table("compile_flags").items()
    }
    if simulator is not None and (found := add_arithmetic_flags(flags.get("iree", ()), simulator.arithmetic)):
        # A compiled program contains the arithmetic, so the simulator cannot change it.
        flags["iree"] = found
    mcu = parse_mcu(get_table("mcu"), path) if "mcu" in data else None
    if mcu is not None:
        flags[MCU_RUNTIME] = (*format_flags(mcu.values), *flags.get(MCU_RUNTIME, ()))
        board.setdefault("runtime", MCU_RUNTIME)
    connection: Connection = make_values(Connection, get_table("connection"), f"{path}: [connection]")
    if not 0 <= connection.fence < 1 << 63:
        raise UsageError(f"{path}: [connection] fence must be a whole number of at least 0")
    made: BoardConfig = make_values(
        BoardConfig,
        {
            **board,
            "arithmetics": arithmetics,
            "devices": devices,
            "compile_flags": flags,
            "labels": get_table("labels"),
            "access": _parse_access(get_table("access"), f"{path}: [access]"),
            "connection": connection,
            "command": parse_runtime(get_table("runtime"), path),
            "power": (power := parse_power(get_table("power"), path)),
            "recover": parse_recover(get_table("recover"), power, path),
            "measure": parse_measure(get_table("measure"), path),
            "meter": parse_meter(get_table("meter"), path),
            "peak": parse_peak(get_table("peak"), f"{path}: [peak]"),
            "console": parse_console(get_table("console"), path),
            "provision": parse_provision(get_table("provision"), path),
            "stack": parse_stack(get_table("stack"), path),
            "simulator": simulator,
            "mcu": mcu,
            "labgrid": make_values(Labgrid, get_table("labgrid"), f"{path}: [labgrid]"),
            "path": path.resolve(),
            "text": text,
            "asks": tuple(list_trusted_settings(data)),
        },
        f"{path}: [board]",
    )
    return made


def parse_power(table: Mapping[str, Any], where: Path) -> Power:
    """Parse the ``[power]`` table.

    Args:
        where: the config file. Relative program paths start at its directory, never at the working directory.

    Raises:
        UsageError: a key is unknown or a value is invalid.
    """
    hooks: dict[str, Command | Http] = {}
    seconds: dict[str, float] = {}
    for key, value in table.items():
        action = key.removeprefix("cmd_")
        if key in ("delay", "boot_s", "timeout_s"):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:
                raise UsageError(f"{where}: [power] {key} must be a number of seconds, at most {MAX_SECONDS:g}")
            seconds[key] = float(value)
        elif action in ACTIONS and action not in hooks:
            hooks[action] = _parse_hook(value, f"{where}: [power] {key}", where.absolute().parent)
        elif action in ACTIONS:
            raise UsageError(
                f"{where}: [power] defines {action!r} twice", hint=f"remove one of {action} and cmd_{action}"
            )
        else:
            reject_key(f"{where}: [power]", key, (*ACTIONS, *list_keys(Power)))
    return Power(hooks, **seconds)


def parse_recover(table: Mapping[str, Any], power: Power, where: Path) -> Recover:
    """Parse the ``[recover]`` table.

    Raises:
        UsageError: a key or step is unknown, or ``[power]`` lacks an action.
    """
    values = {"steps": [], "timeout_s": Recover.timeout_s, **table}
    for key in values.keys() - list_keys(Recover).keys():
        reject_key(f"{where}: [recover]", key, list_keys(Recover))
    seconds = parse_timeout(values["timeout_s"], f"{where}: [recover] timeout_s")
    if not isinstance(values["steps"], list):
        raise UsageError(f"{where}: [recover] steps must be a list")
    steps = tuple(_step(step, power, f"{where}: [recover] step {step!r}", where) for step in values["steps"])
    return Recover(steps, seconds)


def parse_measure(table: Mapping[str, Any], where: Path) -> MeasureCommands:
    """Parse the ``[measure]`` table. Raises UsageError for an unknown key or command."""
    values = {"before": [], "after": [], "timeout_s": MeasureCommands.timeout_s, **table}
    for key in values.keys() - list_keys(MeasureCommands).keys():
        reject_key(f"{where}: [measure]", key, list_keys(MeasureCommands))
    seconds = parse_timeout(values["timeout_s"], f"{where}: [measure] timeout_s")
    steps: dict[str, tuple[Command | BoardCommand, ...]] = {}
    for key in ("before", "after"):
        if not isinstance(values[key], list):
            raise UsageError(f"{where}: [measure] {key} must be a list")
        steps[key] = tuple(_parse_command(one, f"{where}: [measure] {key} {one!r}", where) for one in values[key])
    return MeasureCommands(steps["before"], steps["after"], seconds)


def _parse_command(step: Any, where: str, path: Path) -> Command | BoardCommand:
    """Parse a command line of this machine, or a table with a command of this machine or the board."""
    found = _step({"command": step} if isinstance(step, str) else step, Power(), where, path)
    assert not isinstance(found, str)
    return found


def _step(step: Any, power: Power, where: str, path: Path) -> str | Command | BoardCommand:
    if isinstance(step, str) and step in ACTIONS:
        if not power.can(step):
            raise UsageError(f"{where} needs [power] {step}")
        return step
    if isinstance(step, dict) and step.keys() == {"command"}:
        hook = _parse_hook(step["command"], where, path.absolute().parent)
        if isinstance(hook, Command):
            return hook
    if isinstance(step, dict) and step.keys() == {"board"}:
        return BoardCommand(parse_words(step["board"], where))
    takes = f'one of {", ".join(ACTIONS)}, {{ command = ["program"] }} or {{ board = ["program"] }}'
    raise UsageError(f"{where} is unknown", hint=takes)


def _parse_hook(value: Any, where: str, folder: Path) -> Command | Http:
    if isinstance(value, dict):
        if not str(value.get("url", "")).startswith(("http://", "https://")):
            raise UsageError(f"{where}: url must begin with http:// or https://")
        made: Http = make_values(Http, value, f"{where}:")
        return made
    argv = parse_words(value, where)
    program = str(folder / argv[0]) if "/" in argv[0] else argv[0]
    return Command((program, *argv[1:]))


def parse_runtime(values: Mapping[str, Any], path: Path) -> RuntimeCommand:
    """Parse the ``[runtime]`` table. Raises UsageError for an unknown key, value or placeholder."""
    where = f"{path}: [runtime]"
    runtime: RuntimeCommand = make_values(RuntimeCommand, values, where)
    for name in runtime.environment:
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"{where}: invalid environment variable name {name!r}")
    for key, known in _PLACEHOLDERS.items():
        texts = getattr(runtime, key)
        for text in texts if isinstance(texts, tuple) else [texts]:
            _check_placeholders(where, key, known, text)
    for key, allowed in (("kind", RUNTIME_KINDS), ("tensors", TENSOR_FORMATS)):
        if getattr(runtime, key) not in allowed:
            raise UsageError(
                f"{where} {key} is {getattr(runtime, key)!r}", hint=f"expected one of {', '.join(allowed)}"
            )
    if runtime.program and runtime.file:
        raise UsageError(
            f"{where} sets both program (a path on the board) and file (a file that hil uploads)",
            hint="remove program or file",
        )
    if "/" in runtime.program and not runtime.program.startswith("/"):
        raise UsageError(f"{where} program {runtime.program!r} must be a name or an absolute path on the board")
    return runtime


def _check_placeholders(where: str, key: str, known: Sequence[str], text: str) -> None:
    for name in PLACEHOLDER.findall(text):
        if name not in known:
            raise UsageError(
                f"{where} {key}: unknown placeholder {{{name}}}",
                hint=f"{did_you_mean(name, known)}known: {', '.join(f'{{{one}}}' for one in known)}",
            )
        if name in _SEVERAL and text != f"{{{name}}}":
            raise UsageError(f"{where} {{{name}}} expands to multiple arguments and must be a separate flag")
