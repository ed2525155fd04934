"""Checks of entry points. The functions run in a worker process, because they import the package."""

from __future__ import annotations

import importlib.util
import inspect
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hil.controller.backends.references import Reference
from hil.controller.backends.targets import Target
from hil.controller.models.executorch_backends import ExecuTorchBackend
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.recipe import Recipe
from hil.controller.models.importers import Importer
from hil.controller.storage.sources.packages import load
from hil.controller.workloads.bundles.formats import Format
from hil.controller.workloads.plugin_check.rules import ContractFinding
from hil.core.boards import read_board
from hil.core.field_types import is_a
from hil.core.guarded import format_error
from hil.core.installed import list_entry_points
from hil.core.meter_config import METER_GROUP
from hil.core.runtimes import COMPILER_GROUP, RUNTIME_GROUP, TARGET_GROUP
from hil.errors import UsageError

# Group -> type of the object; None is a function or a class.
GROUPS: Mapping[str, type | None] = MappingProxyType(
    {
        "hil.references": Reference,
        "hil.importers": Importer,
        COMPILER_GROUP: None,
        RUNTIME_GROUP: None,
        TARGET_GROUP: None,
        "hil.flows": None,
        "hil.executorch_backends": ExecuTorchBackend,
        "hil.recipes": Recipe,
        "hil.bundle_formats": Format,
        "hil.links": None,
        METER_GROUP: None,
        "hil.board_providers": None,
        "hil.board_configs": None,
    }
)
# Keyword arguments of a compiler: hil.controller.models.compiling.CompileOrder.
_ORDER = (
    *("runtime", "flags", "debug_ir", "debug_ir_passes", "failure"),
    *("cache", "recompute", "isolated", "timeout", "log"),
)
_MACHINES: tuple[dict[str, Any], ...] = (
    {"arch": "x86_64", "system": "Linux", "cpu_features": ["avx2", "fma"], "cpu_parts": []},
    {"arch": "aarch64", "system": "Linux", "cpu_features": ["fp", "asimd"], "cpu_parts": ["0x41:0xd03"]},
    {"arch": "riscv64", "system": "Linux", "cpu_features": ["rv64imafdc"], "cpu_parts": []},
    {},
)


def find_point(group: str, name: str, package: str) -> EntryPoint:
    """Return an entry point of a package."""
    found = [point for point in list_entry_points(group) if point.name == name]
    return next((point for point in found if point.dist is not None and point.dist.name == package), found[-1])


def check_entry_point(group: str, name: str, package: str) -> list[list[str]]:
    """Import an entry point, and check its type and arguments. Return the violations."""
    point = find_point(group, name, package)
    try:
        thing = point.load()
    except BaseException as error:
        return [ContractFinding("load", format_error(error)).to_json()]
    try:
        if group == "hil.flows":
            _check_flows(thing)
        else:
            load(point, GROUPS[group])
    except (UsageError, TypeError, ValueError) as error:
        return [ContractFinding("type", getattr(error, "message", str(error))).to_json()]
    if group == RUNTIME_GROUP and not inspect.isclass(thing):
        return [ContractFinding("type", f"must be a class, got {thing!r:.80}").to_json()]
    wanted: dict[str, Callable[[], Any]] = {
        COMPILER_GROUP: lambda: _bind(thing, "model", **dict.fromkeys(_ORDER)),
        RUNTIME_GROUP: lambda: _bind(thing, "options"),
        TARGET_GROUP: lambda: _bind(thing, "machine"),
        "hil.links": lambda: _bind(thing, "address", "config"),
        METER_GROUP: lambda: _bind(thing, "options"),
        "hil.board_providers": lambda: _bind(thing),
    }
    try:
        wanted.get(group, lambda: None)()
    except TypeError as error:
        return [ContractFinding("signature", str(error)).to_json()]
    return [one.to_json() for one in _check_target(thing)] if group == TARGET_GROUP else []


def list_flags(name: str, package: str) -> list[list[str]]:
    """Return the flags that a package's target function chooses: for this machine, then different ones for others.

    The flags are [] if the function fails.
    """
    here = {"arch": platform.machine(), "system": platform.system(), "cpu_features": [], "cpu_parts": []}
    found: list[list[str]] = []
    for machine in (here, *_MACHINES):
        flags = _choose_flags(name, package, machine)
        if flags not in found:
            found.append(flags)
    return found


def _choose_flags(name: str, package: str, machine: Mapping[str, Any]) -> list[str]:
    if not any(point.name == name for point in list_entry_points(TARGET_GROUP)):
        return []
    try:
        return list(find_point(TARGET_GROUP, name, package).load()(machine).flags)
    except Exception:  # the check of the target reports the error
        return []


def _bind(function: Any, *arguments: Any, **keywords: Any) -> None:
    """Raise TypeError if the function does not take the arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function of a library without a signature
        return
    signature.bind(*arguments, **keywords)


def _check_flows(thing: Any) -> None:
    flows = thing() if callable(thing) else thing
    for flow in flows if isinstance(flows, list | tuple) else (flows,):
        is_a(Flow)(flow)


def _check_target(choose: Callable[..., Any]) -> list[ContractFinding]:
    found = []
    for machine in _MACHINES:
        what = f"for a machine with the architecture {machine.get('arch', 'unknown')}"
        try:
            is_a(Target)(choose(machine))
        except UsageError:
            continue
        except BaseException as error:
            found.append(ContractFinding("target", f"{what}: {format_error(error)}"))
    return found


def check_board_configs(value: str) -> list[list[str]]:
    """Read the board configs in a package's directory."""
    package, *parts = value.split(".")
    spec = importlib.util.find_spec(package)
    folders = [Path(place, *parts) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    files = [file for folder in folders for file in sorted(folder.glob("*.toml"))]
    if not files:
        return [ContractFinding("board-config", f"no .toml file in {value}").to_json()]
    found = []
    for file in files:
        try:
            read_board(file)
        except UsageError as error:
            found.append(ContractFinding("board-config", error.message).to_json())
    return found
