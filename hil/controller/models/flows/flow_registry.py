"""Load flows from hil, packages and ``flows.toml``."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.compare.criteria import parse_accept
from hil.compare.tolerance import check_tolerance
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.recipe import check_settings
from hil.controller.storage.sources.packages import Registered, describe_entry_point, load, make_refused_error, pick
from hil.core.arithmetic import check_arithmetic
from hil.core.config_files import check_trust, parse_toml
from hil.core.field_types import check_fields
from hil.core.files import digest_file, read_text, suggest_path
from hil.core.guarded import format_value, guard_plugin
from hil.core.installed import list_entry_points
from hil.core.runtimes import COMPILER_GROUP, NO_COMPILER, RUNTIMES, list_known_runtimes
from hil.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

FLOWS_FILE = "flows.toml"
DEFAULT_FLOW = "iree"
_GROUP = "hil.flows"


def load_flows(beside: Path = Path()) -> Registered[Flow]:
    """Return all flows by name.

    Sources, in this order:

    - hil's flows
    - entry points of the group ``hil.flows`` (a :class:`Flow`, a list of flows, or a function that returns either),
      which may replace hil's flows
    - ``flows.toml`` in the directory ``beside`` (the working directory, or the models' directory), which cannot replace
      other flows

    Raises:
        UsageError: a file is unreadable or invalid.
    """
    found, broken = read_flows(Path(__file__).with_name("built_in.toml")), {}
    for point in list_entry_points(_GROUP):
        try:
            added = _load_entry_point(point)
        except UsageError as error:
            broken[point.name] = error
            continue
        for flow in added:
            name = str(flow.name)
            try:
                with guard_plugin(f"{describe_entry_point(point)} flow {name!r}", UsageError, UsageError):
                    check_fields(flow)
                    check_flow(flow, f"{describe_entry_point(point)} flow {name!r}")
                found[name] = flow
            except UsageError as error:
                broken[name] = error
                found.pop(name, None)
    if (beside / FLOWS_FILE).is_file():
        own = read_flows(beside / FLOWS_FILE)
        found = {name: flow for name, flow in own.items() if name not in broken} | found
    return Registered(found, broken)


def list_flow_names(beside: Path = Path()) -> list[str]:
    """Return the names of all flows without checking them. An entry point may define flows with other names."""
    names: list[str] = []
    for path in (Path(__file__).with_name("built_in.toml"), beside / FLOWS_FILE):
        with contextlib.suppress(OSError, UnicodeDecodeError, UsageError):
            names += parse_toml(read_text(path), path)
    return [*names, *(point.name for point in list_entry_points(_GROUP))]


def load_flow(text: str, beside: Path = Path(), *, trusted: bool = False) -> Flow:
    """Return the flow for a name, ``FILE.toml`` with a single flow, or ``FILE.toml:NAME``.

    Args:
        text: name or file of the flow.
        beside: directory with an optional ``flows.toml``.
        trusted: True to trust this directory. Otherwise, a flow with compiler flags in its ``flows.toml`` needs the
            user's approval, because compiler flags can write files and run programs.

    Raises:
        UsageError: the flow does not exist, is invalid, or is not trusted.
    """
    known = load_flows(beside)
    known.check(text)
    if text in known:
        flow, path = known[text], beside / FLOWS_FILE
        if flow.compile_flags and not trusted and text not in load_flows(Path(os.devnull)):
            asks = [f"compile_flags of the flow {text}"]
            check_trust(path.absolute(), digest_file(path), asks, f"--flow {path}:{text}")
        return flow
    file, found, name = text.rpartition(".toml:")
    if found or text.endswith(".toml"):
        path = Path(f"{file}.toml") if found else Path(text)
        held = read_flows(path)
        if not found and len(held) == 1:
            return next(iter(held.values()))
        if found and name in held:
            return held[name]
        problem = f"flow {name!r} not found in {path}" if found else f"expected one flow in {path}, got {len(held)}"
        raise UsageError(
            problem, hint=f"{did_you_mean(name, held)}select one: {path}:{next(iter(held))}; flows: {', '.join(held)}"
        )
    raise UsageError(
        f"flow {text!r} not found",
        hint=f"{did_you_mean(text, known)}known flows: {', '.join(known)}; or pass a file: my.toml, my.toml:NAME"
        f"{known.format_broken()}",
    )


def _load_entry_point(point: EntryPoint) -> list[Flow]:
    thing = load(point, object)
    if callable(thing):
        with guard_plugin(describe_entry_point(point), UsageError, UsageError):
            thing = thing()
    listed = [thing] if isinstance(thing, Flow) else thing
    if not isinstance(listed, list | tuple) or not all(isinstance(one, Flow) for one in listed):
        raise make_refused_error(point, f"must be a hil.plugins.Flow or a list of flows, got {format_value(thing)}")
    return list(listed)


_TEXTS = ("runtime", "device", "compiler", "recipe", "arithmetic", "description")
_NUMBERS = ("rtol", "atol", "quanta", "min_sqnr_db")
# Key of a flow's table -> description and types of the value.
_KINDS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(_TEXTS, ("a string", str)),
    **dict.fromkeys(_NUMBERS, ("a number", (int, float))),
    **dict.fromkeys(("compile_flags", "references", "accept"), ("a list of strings", list)),
    "settings": ("a table", dict),
}
_EXAMPLE = '[my-flow] runtime = "iree"'


def read_flows(path: Path) -> dict[str, Flow]:
    """Return the flows of a file by name. Raises UsageError if the file is unreadable or invalid."""
    try:
        data = parse_toml(read_text(path), path)
    except FileNotFoundError as error:
        raise UsageError(f"flow file not found: {path}", hint=suggest_path(path).rstrip()) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not data:
        raise UsageError(f"{path} defines no flows", hint=f"add a table for each flow, such as {_EXAMPLE}")
    return {name: _parse_flow(name, table, f"{path}: [{name}]") for name, table in data.items()}


def check_flow(flow: Flow, where: str) -> None:
    """Raise UsageError for an invalid flow from any source."""
    try:
        if not flow.runtime:
            raise UsageError("missing runtime", hint='set the runtime, such as runtime = "iree" or "onnxruntime"')
        if flow.compiler:
            pick("compiler", dict.fromkeys(_list_compilers()), flow.compiler)
        else:
            # A flow may use a runtime that only boards have. Such a flow must specify the compiler.
            pick("runtime", list_known_runtimes(), flow.runtime)
        check_settings(flow)
        check_tolerance(flow.rtol, flow.atol)
        parse_accept(flow.accept, option="accept")
        check_arithmetic(flow.arithmetic, "arithmetic")
        if flow.quanta is not None and not 0 <= flow.quanta < math.inf:
            raise UsageError(f"invalid quanta {flow.quanta:g}: expected a finite number of at least 0")
        if flow.quanta is not None and flow.atol is not None:
            raise UsageError("quanta and atol are mutually exclusive", hint="remove one of them")
        if flow.min_sqnr_db is not None and not math.isfinite(flow.min_sqnr_db):
            raise UsageError(f"invalid min_sqnr_db {flow.min_sqnr_db:g}: expected a finite number of dB")
        if flow.min_sqnr_db is not None and not flow.recipe:
            raise UsageError("min_sqnr_db requires a recipe: SQNR compares the model before and after the recipe")
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error


def _list_compilers() -> list[str]:
    """Return the names of all compilers without loading them."""
    own = {NO_COMPILER, *(info.compiler for info in RUNTIMES.values())}
    return sorted(own | {point.name for point in list_entry_points(COMPILER_GROUP)})


def _parse_flow(name: str, table: Any, where: str) -> Flow:
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table", hint=f"define a flow as a table, such as {_EXAMPLE}")
    values: dict[str, Any] = {"runtime": ""}
    for key, value in table.items():
        if key not in _KINDS:
            raise UsageError(
                f"{where}: unknown key {key!r}", hint=f"{did_you_mean(key, _KINDS)}known keys: {', '.join(_KINDS)}"
            )
        wanted, kinds = _KINDS[key]
        texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        plain = all(isinstance(one, str) and "\0" not in one for one in texts)
        if isinstance(value, bool) or not isinstance(value, kinds) or not plain:
            raise UsageError(f"{where} {key} must be {wanted}, got {value!r:.80}")
        values[key] = tuple(value) if isinstance(value, list) else value
    flow = Flow(name, **values)
    check_flow(flow, where)
    return flow
