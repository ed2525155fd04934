"""Flows as TOML: a table a flow, its name the table's."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from hil.compare.tolerance import check_tolerance
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.recipe import check_settings
from hil.controller.storage.registry import pick, points
from hil.core.config_files import parse_toml
from hil.core.files import read_text
from hil.core.runtimes import NO_COMPILER, RUNTIMES
from hil.errors import UsageError, did_you_mean

_KEYS = tuple(one.name for one in fields(Flow) if one.name != "name")
_TEXTS = ("runtime", "compiler", "recipe", "description")
_NUMBERS = ("rtol", "atol", "quanta", "min_sqnr_db")
_EXAMPLE = '[my-flow] runtime = "iree"'


def read_flows(path: Path) -> dict[str, Flow]:
    """The flows of a file, by name.

    Raises:
        UsageError: it cannot be read, or says what no flow can be.
    """
    try:
        data = parse_toml(read_text(path), path)
    except FileNotFoundError as error:
        raise UsageError(f"no such file of flows: {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not data:
        raise UsageError(f"{path} holds no flow", hint=f"a table for each, such as {_EXAMPLE}")
    return {name: _flow(name, table, f"{path}: [{name}]") for name, table in data.items()}


def check_flow(flow: Flow, where: str) -> None:
    """Refuse a flow that cannot be meant, whoever made it.

    Args:
        flow: what to look at.
        where: how messages call it.

    Raises:
        UsageError: there is no such compiler or recipe, a setting is none of the recipe's, a tolerance cannot fail.
    """
    try:
        if not flow.runtime:
            raise UsageError("it has no runtime", hint='runtime = "iree" or "onnxruntime"')
        if flow.compiler:
            pick("compiler", dict.fromkeys(_compilers()), flow.compiler)
        check_settings(flow)
        check_tolerance(flow.rtol, flow.atol)
        if flow.quanta is not None and not 0 <= flow.quanta < math.inf:
            raise UsageError(f"quanta is {flow.quanta:g}: it is a number of 0 or more")
        if flow.quanta is not None and flow.atol is not None:
            raise UsageError("quanta and atol are two ways to say the same", hint="give one of them")
        if flow.min_sqnr_db is not None and not math.isfinite(flow.min_sqnr_db):
            raise UsageError(f"min_sqnr_db is {flow.min_sqnr_db:g}: it is a number of dB")
        if flow.min_sqnr_db is not None and not flow.recipe:
            raise UsageError("min_sqnr_db without a recipe: there is no other model to be near to")
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error


def _compilers() -> list[str]:
    """Return the names of all compilers, of which none is loaded."""
    own = {NO_COMPILER, *(info.compiler for info in RUNTIMES.values())}
    return sorted(own | {point.name for point in points("hil.compilers")})


def _flow(name: str, table: Any, where: str) -> Flow:
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table", hint=f"a flow is a table, such as {_EXAMPLE}")
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _KEYS:
            raise UsageError(f"{where} has no {key!r}", hint=f"{did_you_mean(key, _KEYS)}it takes {', '.join(_KEYS)}")
        values[key] = _typed(key, value, where)
    flow = Flow(name, **{"runtime": "", **values})
    check_flow(flow, where)
    return flow


def _typed(key: str, value: Any, where: str) -> Any:
    if key in _TEXTS:
        wanted, fits = "a text", isinstance(value, str) and "\0" not in value
    elif key in _NUMBERS:
        wanted, fits = "a number", isinstance(value, int | float) and not isinstance(value, bool)
    elif key == "settings":
        wanted, fits = "a table", isinstance(value, dict)
    else:
        wanted = "a list of texts"
        fits = isinstance(value, list) and all(isinstance(one, str) and "\0" not in one for one in value)
    if not fits:
        raise UsageError(f"{where} {key} must be {wanted}, not {value!r:.80}")
    return tuple(value) if isinstance(value, list) else value
