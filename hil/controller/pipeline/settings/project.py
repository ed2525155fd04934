"""Read the project file ``hil.toml``: default options for all commands, and settings of models by file name.

::

    [defaults]                                   # for options that the command line does not set
    accept = ["sqnr>=60"]
    rtol = 1e-3

    [models."*_int8.onnx"]                       # a file name pattern; later tables take precedence
    atol = 0.5

    [models."detector.onnx".outputs."boxes"]
    accept = ["set(iou=0.9)>=0.95"]

    [history]                                    # see hil.controller.pipeline.settings.history_settings
    auto = true

hil searches the current directory and the parents, up to the repository's root or the home directory. The keys are the
fields of :class:`RunSettings`. ``[defaults]`` also has the keys of :mod:`.command_keys`. Settings that run programs,
write files or select a board require trust (``hil board trust DIR``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hil.controller.pipeline.settings.command_keys import (
    COMMAND_KEYS,
    get_flow_file,
    needs_trust,
    resolve_command_key,
)
from hil.controller.pipeline.settings.history_settings import (
    TABLE,
    HistorySettings,
    is_inside,
    read_history_table,
)
from hil.controller.pipeline.settings.model_settings import check_models, is_model_key
from hil.controller.pipeline.settings.options import PATH_OR_NONE, RunSettings, Spec, check_value, list_specs
from hil.core.boards import load_board
from hil.core.config_files import check_trust, parse_toml
from hil.core.digest import digest_of
from hil.core.files import digest_file, read_text
from hil.errors import UsageError, did_you_mean, format_expected

FILE = "hil.toml"
_TABLES = ("defaults", "models", TABLE)
_OUTPUTS = "outputs"
# Options with tensors are not allowed, because tensors apply to a single command.
_NOT_KEYS = ("inputs", "expected")
# Keys that need trust: compiler flags can write files and run programs.
NEED_TRUST = ("compile_flags", "debug_ir")
# Criteria that need trust, because they run code.
FUNCTIONS = "python:..."


@dataclass(frozen=True)
class Project:
    """Contents of a project file."""

    path: Path
    defaults: Mapping[str, Any]  # field of RunSettings -> value in the command line's form
    models: Mapping[str, Mapping[str, Any]]  # file name pattern -> field -> value in the library's form
    history: HistorySettings
    asks: tuple[str, ...]  # settings that require the user's trust
    digest: str  # digest of the file and of the Python and flow files that it names; "" if a file cannot be read
    commands: Mapping[str, str] = field(default_factory=dict)  # key of COMMAND_KEYS -> value, with resolved paths

    def use(self, name: str) -> str:
        """Return the value of a key of :data:`COMMAND_KEYS`, or "" if it is not set.

        Raises:
            UsageError: the value needs trust that the user has not given.
        """
        check_trust(self.path, self.digest, [one for one in self.asks if one == _name_ask(name)])
        return self.commands.get(name, "")

    def use_board(self) -> tuple[str, str]:
        """Return the values of ``board`` and ``runtime_hw_type``, "" for a missing key.

        Raises:
            UsageError: a board is unknown, or its config or its use needs trust that the user has not given.
        """
        from hil.controller.devices.choosing.board_resolver import is_without_config

        found = self.use("board"), self.use("runtime_hw_type")
        for name in found:
            if name and not is_without_config(name):
                try:
                    load_board(name, typed=False)
                except UsageError as error:
                    error.add(f"selected by {self.path}")
                    raise
        return found


def find_project(start: Path) -> Path | None:
    """Return the project file of a directory, or None.

    The search includes parent directories, up to a repository's root or the home directory. Outside of a repository and
    of the home directory, only the directory itself is searched.
    """
    try:
        home = Path.home()
    except RuntimeError:
        home = None
    start = start.absolute()
    folders = [start, *start.parents]
    ends = [number for number, folder in enumerate(folders) if folder == home or (folder / ".git").exists()]
    for folder in folders[: ends[0] + 1 if ends else 1]:
        if (folder / FILE).is_file():
            return folder / FILE
    return None


def load_project(start: Path) -> Project | None:
    """Return the project of a directory, or None without a project file.

    Raises:
        UsageError: the file is invalid, or contains settings that the user has not trusted. Trust in the keys of
            :data:`COMMAND_KEYS` is checked later, by :meth:`Project.use`.
    """
    path = find_project(start)
    if path is None:
        return None
    project = read_project(path)
    check_trust(path, project.digest, [one for one in project.asks if one not in map(_name_ask, COMMAND_KEYS)])
    return project


def find_history(start: Path) -> HistorySettings:
    """Return the history settings of a directory, from the project file or the defaults.

    Raises:
        UsageError: the project file is invalid, or its history needs trust that the user has not given.
    """
    path = find_project(start)
    if path is None:
        return HistorySettings()
    project = read_project(path)
    check_trust(path, project.digest, [one for one in project.asks if one.startswith(f"[{TABLE}]")])
    return project.history


def read_project(path: Path) -> Project:
    """Read a project file without checking trust. Raises UsageError if the file is unreadable or invalid."""
    from hil.compare.criteria import list_function_files

    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    data = parse_toml(text, path)
    for name in data:
        if name not in _TABLES:
            _reject_key(path, f"unknown table [{name}]", name, _TABLES)
    table = dict(_require_table(path, "[defaults]", data.get("defaults", {})))
    commands = {name: _read_command_key(path, name, table.pop(name)) for name in COMMAND_KEYS if name in table}
    specs = list_key_specs()
    defaults = dict(_read_table(path, "[defaults]", table, specs, COMMAND_KEYS))
    specs = {name: spec for name, spec in specs.items() if is_model_key(name, spec)}
    models = {}
    for pattern, table in _require_table(path, "[models]", data.get("models", {})).items():
        where = f'[models."{pattern}"]'
        table = dict(_require_table(path, where, table))
        outputs = _read_outputs(path, where, table.pop(_OUTPUTS, {}))
        values = dict(_read_table(path, where, table, specs, {_OUTPUTS: None}))
        accept = (*values.pop("accept", ()), *outputs)
        values = {name: _convert_value(path, where, name, value) for name, value in values.items()}
        models[pattern] = {**values, **({"accept": accept} if accept else {})}
    try:
        check_models(models)
    except UsageError as error:
        raise UsageError(f"{path}: [models] {error.message}", hint=error.hint) from error
    asks = [_name_ask(name) for name, value in commands.items() if needs_trust(path, name, value)]
    files = [file] if (file := get_flow_file(commands.get("flow", ""))) else []
    for where, values in (("[defaults]", defaults), *((f'[models."{one}"]', models[one]) for one in models)):
        asks += [f"{where} {name}" for name in NEED_TRUST if name in values]
        if functions := list_function_files(values.get("accept", ())):
            asks.append(f"{where} accept = {FUNCTIONS}")
            files += functions
    history = read_history_table(path, data.get(TABLE, {}))
    if not is_inside(path, history):
        asks.append(f"[{TABLE}] path")
    try:
        digest = digest_of("\0".join([text, *map(digest_file, map(Path, files))]).encode()) if asks else ""
    except OSError:
        digest = ""
    return Project(path, defaults, models, history, tuple(asks), digest, commands)


def _name_ask(key: str) -> str:
    """Return the text for a key of ``[defaults]`` in the list of settings that need trust."""
    return f"[defaults] {key}"


def _read_command_key(path: Path, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{path}: [defaults] {name} must be a string, got {value!r:.80}")
    if name == "flow" and not get_flow_file(value):
        _check_flow(path, value)
    return resolve_command_key(path, name, value)


def _check_flow(path: Path, name: str) -> None:
    """Raise UsageError for an unknown flow. Load flows of packages only if no other flow has the name."""
    from hil.controller.models.flows.flow_registry import list_flow_names, load_flows

    # Commands search in the working directory, and pytest searches next to its settings.
    folders = (Path(), path.parent)
    known = {one for folder in folders for one in list_flow_names(folder)}
    if name not in known:
        known |= {one for folder in folders for one in load_flows(folder)}
    if name not in known:
        hint = f"{did_you_mean(name, known)}hil flows lists all flows"
        raise UsageError(f"{path}: [defaults] flow {name!r} not found", hint=hint)


def list_key_specs() -> dict[str, Spec]:
    """Return the keys of ``[defaults]`` that are options of a run, with their definitions."""
    return {name: spec for name, spec in list_specs(RunSettings).items() if spec.help and name not in _NOT_KEYS}


def _require_table(path: Path, where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {where} must be a table")
    return value


def _read_table(
    path: Path, where: str, table: Any, specs: Mapping[str, Spec], others: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the keys with values in the command line's form.

    Args:
        specs: the options that the table may set.
        others: other keys of the table, for the hint.
    """
    usual = RunSettings()
    for name, value in _require_table(path, where, table).items():
        if name not in specs:
            _reject_key(path, f"unknown key {name!r} in {where}", name, [*specs, *others])
        wanted, fits = _describe_key(specs[name], getattr(usual, name))
        if not fits(value):
            hint = _suggest_list(name, specs[name], value) if specs[name].repeats else ""
            raise UsageError(f"{path}: {where} {name} must be {wanted}, got {value!r:.80}", hint=hint)
        _check_key_value(f"{path}: {where} {name}", name, specs[name], value)
        if name == "accept":
            yield name, _read_accept(path, f"{where} accept", value)
        elif specs[name].kind is PATH_OR_NONE:
            yield name, str(path.parent / value)
        else:
            yield name, tuple(value) if isinstance(value, list) else value


def _check_key_value(place: str, name: str, spec: Spec, value: Any) -> None:
    """Raise UsageError for a value that no command accepts.

    Args:
        place: the file and the key, for the message.
    """
    if name != "accept":  # criteria are parsed separately, because they may name files
        check_value(place, spec.of_text(value, place) if spec.of_text else value, spec.kind)
    if name == "timeout" and value <= 0:
        raise UsageError(f"{place} must be above 0 seconds, got {value}")
    if name in ("rtol", "atol"):
        from hil.compare.tolerance import check_tolerance

        try:
            check_tolerance(**{"rtol": None, "atol": None, name: value})
        except UsageError as error:
            raise UsageError(f"{place}: {error.message}", hint=error.hint) from None
    if name == "references":
        from hil.controller.backends.references.table import list_reference_names

        known = list_reference_names()
        for one in value:
            if one not in known:
                hint = f"{did_you_mean(one, known)}{format_expected(sorted(known))}"
                raise UsageError(f"{place}: reference {one!r} not found", hint=hint)


def _read_outputs(path: Path, where: str, outputs: Any) -> tuple[str, ...]:
    """Return criteria of the tables for single outputs, as texts of ``--accept``."""
    from hil.compare.criteria import parse_accept

    found: list[str] = []
    for output, table in _require_table(path, f"{where} {_OUTPUTS}", outputs).items():
        here = f'{where[:-1]}.{_OUTPUTS}."{output}"]'
        for name, value in _require_table(path, here, table).items():
            if name != "accept" or not _is_list_of_texts(value):
                _reject_key(path, f"{here} supports only accept, a list of strings", name, ["accept"])
            for text in _read_accept(path, f"{here} accept", value):
                if parse_accept([text], _make_placeholder)[0].output:
                    raise UsageError(f"{path}: {here} accept {text!r} must not name an output")
                found.append(f"{output}: {text}")
    return tuple(found)


def _read_accept(path: Path, where: str, texts: list[str]) -> tuple[str, ...]:
    from hil.compare.criteria import parse_accept, resolve_files

    resolved = tuple(resolve_files(text, path.parent) for text in texts)
    parse_accept(resolved, _make_placeholder, f"{path}: {where}")
    return resolved


def _make_placeholder(file: str, name: str) -> Callable[..., bool]:
    """Return a function that stands for a user's Python function in a criterion.

    The user's file is not loaded, because the user may not trust it yet.
    """
    return lambda actual, reference: False


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _suggest_list(name: str, spec: Spec, value: Any) -> str:
    """Return the hint with a value as a list of strings, ``dims = ["N=2"]``."""
    texts = [spec.metavar or "TEXT"]
    if isinstance(value, str):
        texts = [value]
    elif isinstance(value, dict) and value and all(isinstance(one, (int, str)) for one in value.values()):
        texts = [f"{key}={one}" for key, one in value.items()]
    return f"for example {name} = {json.dumps(texts, ensure_ascii=False)}"


def _describe_key(spec: Spec, default: Any) -> tuple[str, Callable[[Any], bool]]:
    """Return a description of a key's type, and a function that checks a TOML value."""
    if spec.repeats:
        return "a list of strings", _is_list_of_texts
    if isinstance(default, bool):
        return "true or false", lambda value: isinstance(value, bool)
    if isinstance(default, int):
        return "a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, float) or (default is None and spec.metavar is None):
        return "a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    return "a string", lambda value: isinstance(value, str)


def _convert_value(path: Path, where: str, name: str, value: Any) -> Any:
    spec = list_key_specs()[name]
    return spec.of_text(value, f"{path}: {where} {name}") if spec.of_text else value


def _reject_key(path: Path, what: str, name: str, known: Any) -> NoReturn:
    raise UsageError(f"{path}: {what}", hint=f"{did_you_mean(name, known)}known keys: {', '.join(known)}")
