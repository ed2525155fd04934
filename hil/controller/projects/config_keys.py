"""List the keys of hil.toml and board configs.

The reference pages and the JSON schemas are generated from these lists. Names, defaults and meanings come from the
types that store the values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from hil.controller.pipeline.settings.command_keys import COMMAND_KEYS
from hil.controller.pipeline.settings.history_settings import HISTORY_KEYS, SIZE_PATTERN
from hil.controller.pipeline.settings.model_settings import is_model_key
from hil.controller.pipeline.settings.option_names import make_renamer, rename_options
from hil.controller.pipeline.settings.options import RunSettings, Spec, flag_of
from hil.controller.pipeline.settings.project import FUNCTIONS, NEED_TRUST, list_key_specs
from hil.core import board_config
from hil.core.board_parser import BOARD_KEYS
from hil.core.config_files import list_trusted_settings
from hil.core.config_keys import KeyInfo, list_keys
from hil.core.console_config import ConsoleConfig, Provision
from hil.core.mcu_config import Microcontroller
from hil.core.meter_config import MeterConfig
from hil.core.peak_config import PeakConfig

# Type of a value in a JSON schema -> text for people.
Schema = Mapping[str, Any]
_TEXTS: Schema = {"type": "array", "items": {"type": "string"}}
_COMMAND: Schema = {"type": ["string", "array"], "items": {"type": "string"}}
_STACK_VALUE: Schema = {
    "type": ["string", "array", "object"],
    "items": {"type": "string"},
    "properties": {"command": _TEXTS},
    "additionalProperties": False,
}
_MAX_DAY = {"type": "number", "minimum": 0, "maximum": 86400}
_TYPES: Mapping[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    tuple[str, ...]: _TEXTS,
    Mapping[str, str]: {"type": "object", "additionalProperties": {"type": "string"}},
}
# Keys whose values have several forms.
_FORMS: Mapping[tuple[type, str], Schema] = {
    (board_config.Recover, "steps"): {"type": "array", "items": {"type": ["string", "object"]}},
    (board_config.MeasureCommands, "before"): {"type": "array", "items": {"type": ["string", "object"]}},
    (board_config.MeasureCommands, "after"): {"type": "array", "items": {"type": ["string", "object"]}},
    (ConsoleConfig, "command"): _COMMAND,
    (Provision, "command"): _COMMAND,
    (MeterConfig, "command"): _COMMAND,
    (MeterConfig, "options"): {"type": "object"},
    **{(MeterConfig, name): _MAX_DAY for name in ("idle_s", "start_s")},
    (ConsoleConfig, "patterns"): {
        "type": "array",
        "items": {
            "type": ["object"],
            "properties": {name: {"type": "string"} for name in ("name", "pattern", "meaning")},
            "required": ["name", "pattern"],
            "additionalProperties": False,
        },
    },
    **{
        (kind, name): _MAX_DAY
        for kind in (board_config.Power, board_config.Recover, board_config.MeasureCommands, ConsoleConfig, Provision)
        for name in ("delay", "boot_s", "timeout_s")
    },
    **{(Microcontroller, name): _COMMAND for name in ("flash", "reset")},
    **{(Microcontroller, name): {"type": ["string", "integer"]} for name in ("tick_hz", "uart_irq", "stack", "baud")},
    (Microcontroller, "defines"): {"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
    **{(Microcontroller, name): _MAX_DAY for name in ("boot_s", "watchdog_s")},
}
ALWAYS = "yes"


@dataclass(frozen=True)
class ConfigKey:
    """A key of a table."""

    name: str
    schema: Schema
    default: str  # for people; "" for none
    meaning: str
    trust: str = ""  # "" if the key never needs trust, :data:`ALWAYS`, or the values that need trust


@dataclass(frozen=True)
class ConfigTable:
    """A table of a config file.

    Attributes:
        name: header without brackets, ``limits.users.NAME``.
        rest: key for all names that `keys` does not contain; None if other names are errors.
        parent: table that has the same keys with the same meaning, and perhaps others; "" for none.
    """

    name: str
    meaning: str
    keys: tuple[ConfigKey, ...] = ()
    rest: ConfigKey | None = None
    parent: str = ""


def list_project_tables() -> list[ConfigTable]:
    """Return the tables of ``hil.toml``."""
    options = tuple(_list_option_keys())
    commands = tuple(
        ConfigKey(name, {"type": "string", "minLength": 1}, one.default, one.meaning, one.trust)
        for name, one in COMMAND_KEYS.items()
    )
    specs = list_key_specs()
    of_models = tuple(one for one in options if is_model_key(one.name, specs[one.name]))
    accept = next(one for one in options if one.name == "accept")
    return [
        ConfigTable("defaults", "Options that the command line does not give.", (*commands, *options)),
        ConfigTable(
            'models."PATTERN"',
            "Options of the models whose file name or path matches the pattern; later tables override earlier tables.",
            of_models,
            parent="defaults",
        ),
        ConfigTable('models."PATTERN".outputs."NAME"', "Criteria of one output.", (accept,)),
        make_history_table("a place outside of the project"),
    ]


def _list_option_keys() -> Iterator[ConfigKey]:
    usual = RunSettings()
    names = {flag_of(name, spec): f"`{name}`" for name, spec in list_key_specs().items()}
    for name, spec in list_key_specs().items():
        default = getattr(usual, name)
        meaning = rename_options(spec.help.removesuffix(" Repeatable."), make_renamer(names))
        trust = ALWAYS if name in NEED_TRUST else f"`{FUNCTIONS}`" if name == "accept" else ""
        yield ConfigKey(name, _describe_option(spec, default), _format_default(default), meaning, trust)


def _describe_option(spec: Spec, default: Any) -> Schema:
    if spec.repeats:
        return _TEXTS
    if isinstance(default, bool):
        return {"type": "boolean"}
    if spec.bounds is not None:
        return {"type": "integer", "minimum": spec.bounds[0], "maximum": spec.bounds[1]}
    if isinstance(default, int):
        return {"type": "integer"}
    is_number = isinstance(default, float) or (default is None and spec.metavar is None)
    return {"type": "number" if is_number else "string"}


def make_history_table(trust: str = "", **defaults: str) -> ConfigTable:
    """Return the table ``[history]``.

    Args:
        trust: values of ``path`` that need trust.
        defaults: default values that differ from those of a project.
    """
    types: Mapping[str, Schema] = {
        "quota": {"type": "string", "pattern": f"^{SIZE_PATTERN}$"},
        "auto": {"type": "boolean"},
    }
    keys = tuple(
        ConfigKey(
            name,
            types.get(name, {"type": "string"}),
            defaults.get(name, f"`{one.default}`"),
            one.meaning,
            trust * (name == "path"),
        )
        for name, one in HISTORY_KEYS.items()
    )
    return ConfigTable("history", "[History](history.md) of measurements.", keys)


def list_board_tables() -> list[ConfigTable]:
    """Return the tables of a board config."""
    board = board_config.BoardConfig
    hook: Schema = {"type": ["string", "array", "object"], "items": {"type": "string"}}
    actions = {
        "reset": "Command or HTTP request that resets the board.",
        "off": "Command or HTTP request that switches the power off.",
        "on": "Command or HTTP request that switches the power on.",
        "cycle": "Command or HTTP request that switches the power off and on (default: `off`, `delay`, `on`).",
    }
    assert actions.keys() == set(board_config.ACTIONS)
    hooks = [ConfigKey(name, hook, "", text) for name, text in actions.items()]
    hooks += [ConfigKey(f"cmd_{name}", _COMMAND, "", f"labgrid's name of `{name}`.") for name in actions]
    tables = [
        ConfigTable("board", "Description of the board.", list_dataclass_keys(board, lambda name: name in BOARD_KEYS)),
        _make_open_table("arithmetic", "Arithmetic of single runtimes.", "RUNTIME", "arithmetics"),
        _make_open_table("devices", "Devices of runtimes.", "RUNTIME", "devices"),
        _make_open_table("compile_flags", "Flags of compilers.", "COMPILER", "compile_flags"),
        _make_open_table("labels", "Labels.", "LABEL", "labels"),
        _make_open_table("stack", "Parts of the stack.", "PART", "stack"),
        ConfigTable(
            "connection",
            "Connection to the board. Paths are relative to the config.",
            list_dataclass_keys(board_config.Connection),
        ),
        ConfigTable(
            "runtime", "[Board without an agent](agentless.md).", list_dataclass_keys(board_config.RuntimeCommand)
        ),
        ConfigTable(
            "power",
            "[Reset and power switch](board-failures.md#when-a-board-stops-responding).",
            (*hooks, *list_dataclass_keys(board_config.Power)),
        ),
        ConfigTable("recover", "Recovery of a stuck board.", list_dataclass_keys(board_config.Recover)),
        ConfigTable(
            "measure", "Commands before and after a measurement.", list_dataclass_keys(board_config.MeasureCommands)
        ),
        ConfigTable("meter", "[Meter](meters.md) of the board's power.", list_dataclass_keys(MeterConfig)),
        ConfigTable(
            "peak",
            "Peaks from the board's data sheet, for a [roofline](roofline.md) without measured peaks.",
            list_dataclass_keys(PeakConfig),
        ),
        ConfigTable(
            "console",
            "[Console](console.md#configure-a-console). Exactly one of `serial`, `command`, `address`, `labgrid` and "
            "`farm` is required.",
            list_dataclass_keys(ConsoleConfig),
        ),
        ConfigTable(
            "provision", "[Image](board-images.md#write-an-image) of the board.", list_dataclass_keys(Provision)
        ),
        ConfigTable(
            "access",
            "Users and groups of a farm. Without this table, all users may use the board.",
            list_dataclass_keys(board_config.AccessList),
        ),
        ConfigTable("labgrid", "Board that labgrid manages.", list_dataclass_keys(board_config.Labgrid)),
        ConfigTable(
            "mcu",
            "[Microcontroller](microcontrollers.md) on a serial line.",
            list_dataclass_keys(Microcontroller),
        ),
        ConfigTable(
            "simulator",
            "[Simulated board](simulator.md). A config with this table and without an address is a simulator.",
            list_dataclass_keys(board_config.Simulator),
        ),
    ]
    return [_mark_trust(one) for one in tables]


def _make_open_table(table: str, meaning: str, name: str, field: str) -> ConfigTable:
    info = list_keys(board_config.BoardConfig)[field]
    schemas: Mapping[str, Schema] = {"compile_flags": _TEXTS, "labels": {}, "stack": _STACK_VALUE}
    schema = schemas.get(table, {"type": "string", **({"enum": list(info.values)} if info.values else {})})
    return ConfigTable(table, meaning, rest=ConfigKey(name, schema, "", info.meaning))


def _mark_trust(table: ConfigTable) -> ConfigTable:
    """Mark the keys that need trust in a config from a directory of other people."""

    def mark(key: ConfigKey) -> ConfigKey:
        needed = list_trusted_settings({table.name: {key.name: ""}})
        return dataclasses.replace(key, trust=ALWAYS if needed else "")

    return dataclasses.replace(table, keys=tuple(map(mark, table.keys)), rest=table.rest and mark(table.rest))


def list_dataclass_keys(kind: type, is_wanted: Callable[[str], bool] = lambda name: True) -> tuple[ConfigKey, ...]:
    """Return the described fields of a dataclass as keys."""
    hints = get_type_hints(kind)
    defaults = {one.name: one for one in dataclasses.fields(kind)}
    return tuple(
        ConfigKey(
            name, _describe_field(kind, name, hints[name], info), _describe_default(defaults[name], info), info.meaning
        )
        for name, info in list_keys(kind).items()
        if is_wanted(name)
    )


def _describe_field(kind: type, name: str, hint: Any, info: KeyInfo) -> Schema:
    schema = dict(_FORMS.get((kind, name)) or _TYPES[hint])
    if info.values:
        schema["enum"] = ["", *info.values] if info.unset else list(info.values)
    if info.bounds:
        schema |= {"minimum": info.bounds[0], "maximum": info.bounds[1]}
    return schema


def _describe_default(field: dataclasses.Field[Any], info: KeyInfo) -> str:
    if info.unset:
        return info.unset
    if field.default_factory is not dataclasses.MISSING:
        return ""
    return _format_default(field.default)


def _format_default(value: Any) -> str:
    """Return a default value for people; "" for none."""
    if value is None or value == "" or value == () or value == {} or value == math.inf:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return " ".join(f"`{one}`" for one in value) if isinstance(value, tuple) else f"`{value}`"
