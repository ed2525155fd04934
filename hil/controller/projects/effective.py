"""Find the effective value of each option, and the file, variable or board config that sets it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.devices.choosing.board_resolver import (
    BOARD_VARIABLE,
    DEFAULT_HW_TYPE,
    GENERIC,
    get_named_board,
    is_without_config,
)
from hil.controller.models.flows.flow_registry import DEFAULT_FLOW
from hil.controller.models.importers import load_importers
from hil.controller.pipeline.settings.history_settings import TABLE, HistorySettings
from hil.controller.pipeline.settings.model_settings import matches
from hil.controller.pipeline.settings.option_words import format_option_values
from hil.controller.pipeline.settings.options import RunSettings
from hil.controller.pipeline.settings.project import Project, find_project, list_key_specs, read_project
from hil.controller.projects.config_keys import list_project_tables
from hil.controller.records.commands.projects import EffectiveConfig, EffectiveValue, ValueSource, ValueTable
from hil.controller.storage.cache import choose_default_root
from hil.controller.storage.paths import path_exists
from hil.controller.storage.session_folders import DEFAULT_ROOT
from hil.controller.storage.sources.origin import LABELS
from hil.core.arithmetic import FLOAT32
from hil.core.board_config import BoardConfig, Connection, Simulator
from hil.core.boards import find_board, read_board
from hil.core.config_files import get_user_folder, parse_toml, state_of
from hil.core.config_keys import list_keys, remove_links
from hil.core.files import read_text, suggest_path
from hil.core.runtimes import RUNTIMES, choose_runtime
from hil.core.text import hide_logins
from hil.core.variables import VARIABLES, check_variables
from hil.errors import UsageError

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"))
# Variables that other rows show.
_SHOWN_VARIABLES = (BOARD_VARIABLE, LABELS, "HIL_CACHE_DIR")
_SET = "(set)"
_CACHE_MEANING = next(one.meaning for one in VARIABLES if one.name == "HIL_CACHE_DIR")


@dataclass(frozen=True)
class _Origin:
    """A value with its source."""

    value: Any
    source: ValueSource = "built-in"
    where: str = ""

    def to_row(self, table: ValueTable, key: str, *, trusted: bool = True) -> EffectiveValue:
        # A URL may contain a password, and logs of CI may contain the output.
        value = hide_logins(self.value) if isinstance(self.value, str) else self.value
        return EffectiveValue(table=table, key=key, value=value, source=self.source, where=self.where, trusted=trusted)


def find_effective_config(
    start: Path, model: Path | None = None, *, board: str = "", hw_type: str = ""
) -> EffectiveConfig:
    """Return the values that commands in a directory use.

    Args:
        model: model whose tables apply; None for the values of all models.
        board, hw_type: options of the command line.

    Raises:
        UsageError: the model does not exist, the project file is invalid, the board is unknown, or an environment
            variable has an invalid value.
    """
    check_variables()
    if model is not None and not path_exists(model):
        raise UsageError(
            f"model {model} not found",
            hint=f"{suggest_path(model)}specify the path of a model file or of a SavedModel directory",
        )
    path = find_project(start)
    project = read_project(path) if path else None
    untrusted = _list_untrusted(project)
    target = _find_target(project, board, hw_type)
    try:
        config = _read_config(target)
    except UsageError as error:
        if any(one.source == "project" for one in target.values()):
            error.add(f"selected by {path}")
        elif target["board"].source == "environment":
            error.add(f"set by the variable {BOARD_VARIABLE}")
        raise
    rows = [
        *(origin.to_row("defaults", key) for key, origin in target.items()),
        *(origin.to_row("defaults", key) for key, origin in _iter_places(project)),
        *(origin.to_row("defaults", key) for key, origin in _iter_options(project, model, config)),
        *(origin.to_row("history", key) for key, origin in _iter_history(project)),
        *(origin.to_row("board", key) for key, origin in _iter_board(config)),
        *(origin.to_row("environment", key) for key, origin in _iter_environment()),
    ]
    meanings = _list_meanings()
    for row in rows:
        row.meaning = meanings.get((row.table, row.key), "")
        row.trusted = row.source != "project" or f"{row.where} {row.key}" not in untrusted
    return EffectiveConfig(
        project=str(path or ""),
        model=str(model or ""),
        models=list(project.models) if project else [],
        values=rows,
    )


def _list_untrusted(project: Project | None) -> set[str]:
    """Return the settings that need trust which the user has not given, as ``[table] key``."""
    if project is None or not project.asks or state_of(project.path, project.digest) == "trusted":
        return set()
    return {ask.partition(" = ")[0] for ask in project.asks}


def _find_target(project: Project | None, board: str, hw_type: str) -> dict[str, _Origin]:
    """Return the board and the hardware type. Both have the same source, as in the commands."""
    if board or hw_type:
        return {
            "board": _Origin(board or None, *(("command line", "--board") if board else ())),
            "runtime_hw_type": _Origin(hw_type or None, *(("command line", "--runtime-hw-type") if hw_type else ())),
        }
    if named := get_named_board(""):
        return {"board": _Origin(named, "environment", BOARD_VARIABLE), "runtime_hw_type": _Origin(None)}
    commands: Mapping[str, str] = project.commands if project else {}
    found = {key: _read_command(project, key, None) for key in ("board", "runtime_hw_type")}
    if not any(key in commands for key in found):
        found["runtime_hw_type"] = _Origin(DEFAULT_HW_TYPE)
    return found


def _read_command(project: Project | None, key: str, default: str | None) -> _Origin:
    if project is None or key not in project.commands:
        return _Origin(default)
    return _Origin(project.commands[key], "project", "[defaults]")


def _read_config(target: Mapping[str, _Origin]) -> BoardConfig:
    """Read the config of the board, trusted or not."""
    board, hw_type = target["board"].value, target["runtime_hw_type"].value
    name = (hw_type or GENERIC) if board and is_without_config(board) else board or hw_type or DEFAULT_HW_TYPE
    return read_board(find_board(name)).config


def _iter_places(project: Project | None) -> Iterator[tuple[str, _Origin]]:
    for key, default in (
        ("flow", DEFAULT_FLOW),
        ("out", str(DEFAULT_ROOT)),
        ("web_url", None),
        ("notify_github", None),
    ):
        yield key, _read_command(project, key, default)


def _iter_options(project: Project | None, model: Path | None, config: BoardConfig) -> Iterator[tuple[str, _Origin]]:
    """Yield the options of a run."""
    usual = RunSettings()
    runtime = config.runtime
    for name, spec in list_key_specs().items():
        repeats = spec.repeats
        found = _Origin(_to_plain(name, getattr(usual, name), repeats))
        if project and name in project.defaults:
            found = _Origin(_to_plain(name, project.defaults[name], repeats, as_typed=True), "project", "[defaults]")
        for pattern in _list_patterns(project, model):
            assert project is not None
            if name in project.models[pattern]:
                value = _to_plain(name, project.models[pattern][name], repeats)
                if name == "dims":
                    value = _merge_sizes(found.value, value)
                found = _Origin(value, "project", f'[models."{pattern}"]')
        if name == "runtime":
            if not found.value:
                found = _choose_runtime(model, config)
            runtime = str(found.value)
        elif name == "arithmetic" and not found.value and (declared := config.get_arithmetic(runtime)):
            found = _Origin(declared, "board config", str(config.path))
        elif name == "labels" and (more := os.environ.get(LABELS)):
            added = [one.strip() for one in more.split(",") if one.strip()]
            found = _Origin([*found.value, *added], "environment", LABELS)
        yield name, _Origin(None if found.value == "" else found.value, found.source, found.where)


def _choose_runtime(model: Path | None, config: BoardConfig) -> _Origin:
    """Return the only runtime for the model's format, or the board's default."""
    formats = [name for name, one in load_importers().items() if model and model.name.lower().endswith(one.suffixes)]
    if only := next(filter(None, (choose_runtime(one, "") for one in formats)), ""):
        return _Origin(only, "built-in", f"models of the format {formats[0]}")
    return _Origin(config.runtime, "board config", str(config.path))


def _list_patterns(project: Project | None, model: Path | None) -> list[str]:
    return [one for one in project.models if matches(one, model)] if project and model else []


def _to_plain(name: str, value: Any, repeats: bool, *, as_typed: bool = False) -> Any:
    """Return a value as in hil.toml.

    Args:
        as_typed: True if the value has the command line's form already.
    """
    if value is None or isinstance(value, bool):
        return value
    if repeats:
        return [str(one) for one in (value if as_typed else format_option_values(name, value, repeats=True))]
    if name == "input_range" and not as_typed:
        return format_option_values(name, value, repeats=False)[0]
    return value if isinstance(value, (int, float)) else str(value)


def _merge_sizes(before: list[str], after: list[str]) -> list[str]:
    """Merge texts NAME=SIZE by name."""
    sizes = {text.rpartition("=")[0]: text for text in (*before, *after)}
    return list(sizes.values())


def _iter_history(project: Project | None) -> Iterator[tuple[str, _Origin]]:
    settings = project.history if project else HistorySettings()
    given = parse_toml(read_text(project.path), project.path).get(TABLE, {}) if project else {}
    values = {
        "path": str(settings.place),
        "quota": _format_quota(settings.quota),
        "auto": settings.auto,
        "baseline": settings.baseline,
    }
    for key, value in values.items():
        yield key, _Origin(value, "project", f"[{TABLE}]") if key in given else _Origin(value)


def _format_quota(size: int) -> str:
    unit, name = next((one for one in _UNITS if size % one[0] == 0), _UNITS[-1])
    return f"{size // unit} {name}"


def _iter_board(config: BoardConfig) -> Iterator[tuple[str, _Origin]]:
    """Yield the values that the board's config adds."""
    info = RUNTIMES.get(config.runtime)
    values: dict[str, Any] = {
        "name": config.name,
        "hw_type": config.hw_type,
        "address": config.connection.address,
        "device": config.devices.get(config.runtime, ""),
        "compile_flags": list(config.compile_flags.get(info.compiler if info else config.runtime, ())),
    }
    if config.simulator is not None:
        simulator = config.simulator
        values |= {
            "simulator.arithmetic": simulator.arithmetic or FLOAT32,
            "simulator.memory_limit": simulator.memory_limit,
            "simulator.faults": list(simulator.faults),
        }
    for key, value in values.items():
        if value:
            yield key, _Origin(value, "board config", str(config.path))


def _iter_environment() -> Iterator[tuple[str, _Origin]]:
    """Yield directories, and variables that change the behaviour of commands."""
    folders = {
        "cache": (str(choose_default_root()), "HIL_CACHE_DIR"),
        "config": (str(get_user_folder() or ""), "XDG_CONFIG_HOME"),
    }
    for key, (path, variable) in folders.items():
        is_set = bool(os.environ.get(variable)) and (key == "cache" or Path(os.environ[variable]).is_absolute())
        yield key, _Origin(path, "environment", variable) if is_set else _Origin(path)
    for one in VARIABLES:
        if one.use == "read" and one.name not in _SHOWN_VARIABLES:
            value = os.environ.get(one.name)
            if value:
                yield one.name, _Origin(_SET if one.is_secret else value, "environment", one.name)
            elif not one.is_secret:
                yield one.name, _Origin(one.default or None)


def _list_meanings() -> Mapping[tuple[str, str], str]:
    """Return the meaning of each row by table and key, as plain text."""
    tables = {one.name: {key.name: key.meaning for key in one.keys} for one in list_project_tables()}
    board = {name: key.meaning for name, key in list_keys(BoardConfig).items()}
    simulator = {f"simulator.{name}": key.meaning for name, key in list_keys(Simulator).items()}
    found = {
        "defaults": tables["defaults"],
        TABLE: tables[TABLE],
        "board": {
            **board,
            **simulator,
            "address": list_keys(Connection)["address"].meaning,
            "device": board["devices"],
        },
        "environment": {
            **{one.name: one.meaning for one in VARIABLES},
            "cache": _CACHE_MEANING,
            "config": "Directory of the user's board configs and trusted files.",
        },
    }
    return {(table, key): remove_links(text) for table, keys in found.items() for key, text in keys.items()}
