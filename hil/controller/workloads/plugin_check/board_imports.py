"""Import a runtime in a process that has only the modules of a board."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import PurePosixPath

from hil.controller.devices.deploy.wheels import list_agent_packages
from hil.controller.workloads.plugin_check.rules import ContractFinding

# Modules of hil that boards lack.
_NOT_ON_BOARDS = ("hil.api", "hil.controller", "hil.plugins", "hil.sim", "hil.testing", "hil.traces")
# Modules outside the directories of installed packages belong to the package: an unpacked wheel, an editable install.
_IMPORT = """
import importlib, importlib.machinery, json, pathlib, site, sys, sysconfig

missing, present = map(frozenset, json.loads(sys.argv[2]))
folders = [*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))]
folders = [pathlib.Path(folder).resolve() for folder in folders]

def is_installed(spec):
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location else ())]
    return any(folder in pathlib.Path(place).resolve().parents for place in places for folder in folders)

class BoardFinder:
    def find_spec(self, name, path=None, target=None):
        absent = any(name == one or name.startswith(one + ".") for one in missing)
        if path is None and name not in present and name not in sys.stdlib_module_names:
            spec = importlib.machinery.PathFinder.find_spec(name)
            absent = absent or spec is not None and is_installed(spec)
        if absent:
            raise ModuleNotFoundError(f"boards have no module {name}", name=name)

sys.meta_path.insert(0, BoardFinder())
module, _, name = sys.argv[1].partition(":")
getattr(importlib.import_module(module), name)
"""


def check_board_import(value: str, package: str) -> list[list[str]]:
    """Import a runtime's class in a process without the modules that boards lack.

    Boards have the standard library, the packages of the agent, and the requirements of the package, which
    `hil board deploy` demands.
    """
    distributions = list_board_distributions(package)
    present = [value.partition(":")[0].partition(".")[0], *list_modules(distributions)]
    command = [sys.executable, "-c", _IMPORT, value, json.dumps([_NOT_ON_BOARDS, present])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if not done.returncode:
        return []
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return [ContractFinding("board-import", lines[-1]).to_json()]


def list_board_distributions(package: str) -> set[str]:
    """Return the names of the distributions that a board with a package has."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    # A board has hil without the requirements of the controller.
    found = {"hil", *list_agent_packages(())}
    waiting = [package]
    while waiting:
        name = str(canonicalize_name(waiting.pop()))
        if name in found:
            continue
        found.add(name)
        try:
            needed = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def list_modules(distributions: Iterable[str]) -> set[str]:
    """Return the top-level modules of installed distributions."""
    found = set()
    for name in distributions:
        found.add(name.replace("-", "_"))
        try:
            files = metadata.files(name) or ()
        except metadata.PackageNotFoundError:
            continue
        tops = (PurePosixPath(file).parts[0] for file in files if PurePosixPath(file).suffix in (".py", ".so", ".pyd"))
        found.update(top.partition(".")[0] for top in tops)
    return found
