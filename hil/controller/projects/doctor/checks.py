"""Run all checks of the environment, in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hil.controller.projects.doctor.packages import check_packages
from hil.controller.projects.doctor.results import FAIL, NOTE, PASS, make_check
from hil.controller.records.commands.boards import BoardCheck
from hil.controller.records.commands.projects import EnvironmentCheck
from hil.errors import HilError

_SANDBOX_NOTE = "not sandboxed: "


def check_environment(here: Path, *, runs_model: bool = True) -> Iterator[EnvironmentCheck]:
    """Check this machine.

    Args:
        here: directory of the commands.
        runs_model: also run a tiny model on the simulator. This needs some seconds.
    """
    groups = {
        "packages": check_packages,
        "variables": _check_variables,
        "directories": lambda: _check_directories(here),
        "programs": _check_programs,
        **({"simulator": check_simulator} if runs_model else {}),
    }
    for name, check in groups.items():
        yield from _report_missing_package(name, check)


def _check_variables() -> Iterator[EnvironmentCheck]:
    from hil.core.variables import check_variables

    try:
        check_variables()
    except HilError as error:
        yield EnvironmentCheck("variables", FAIL, error.message, error.hint)
    else:
        yield EnvironmentCheck("variables", PASS, "the environment variables of hil have valid values")


def _check_directories(here: Path) -> Iterator[EnvironmentCheck]:
    # Imported on use: a package that these checks import may be missing.
    from hil.controller.projects.doctor.places import check_places

    return check_places(here)


def _check_programs() -> Iterator[EnvironmentCheck]:
    from hil.controller.projects.doctor.programs import check_programs

    return check_programs()


def _report_missing_package(name: str, check: Callable[[], Iterator[EnvironmentCheck]]) -> Iterator[EnvironmentCheck]:
    """Yield the checks of a group. If they cannot run without a missing or broken package, yield a failure."""
    try:
        yield from check()
    except ImportError as error:
        yield EnvironmentCheck(name, FAIL, f"cannot check: {error}", "pip check; then reinstall the named packages")


def check_simulator() -> Iterator[EnvironmentCheck]:
    """Check that a tiny model runs on the simulator and matches the reference, and that the simulator isolates it."""
    from hil.controller.devices.choosing.board_resolver import choose
    from hil.controller.devices.health import FAIL as BOARD_FAIL
    from hil.controller.workloads.board_checks import check_board

    said: list[str] = []
    checks: list[BoardCheck] = []
    try:
        checks += check_board(choose(hw_type="sim"), say=said.append)
    except HilError as error:
        checks.append(BoardCheck("agent", BOARD_FAIL, error.message, error.hint))
    wrong = [f"{one.name}: {one.found}" for one in checks if one.state == BOARD_FAIL]
    fixes = "; ".join(filter(None, (one.fix for one in checks if one.state == BOARD_FAIL)))
    fine = checks[-1].found
    yield make_check("simulator", "; ".join(wrong), fine, fixes or "hil board check sim")
    if not wrong:
        yield _check_sandbox(said)


def _check_sandbox(said: list[str]) -> EnvironmentCheck:
    """Check that the simulator isolated the program, from the messages of the simulator."""
    fine = "programs on the simulator have no network and no writable files"
    if os.environ.get("HIL_SANDBOX") == "off":
        return make_check("sandbox", "disabled by HIL_SANDBOX=off", fine, "unset HIL_SANDBOX", outcome=NOTE)
    missing = next((line.removeprefix(_SANDBOX_NOTE) for line in said if line.startswith(_SANDBOX_NOTE)), "")
    fix = "allow user namespaces; in a container: --privileged, or --security-opt seccomp=unconfined"
    return make_check("sandbox", missing, fine, fix, outcome=NOTE)
