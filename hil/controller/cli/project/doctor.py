"""`hil doctor`: check the environment."""

from __future__ import annotations

from pathlib import Path

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer
from hil.controller.projects.doctor.results import FAIL, PASS
from hil.controller.records.commands.projects import DoctorReport, EnvironmentCheck
from hil.errors import EXIT_OK, EXIT_USAGE

_PACKAGE = "package "


@make_command(epilog="Example: hil doctor --quick")
@click.option("--quick", is_flag=True, help="Do not run a model on the simulator.")
@click.option("--all", "every", is_flag=True, help="List each required package, not only the number of packages.")
@json_option
def doctor(quick: bool, every: bool, as_json: bool) -> int:
    """Check Python, packages, directories and programs on this machine, and print a fix for every problem.

    Also runs a tiny model on the simulator. Exit code: 0 if everything that hil requires works, 2 otherwise. A `note`
    is not a failure: an optional part is missing. `hil board check` checks a board.
    """
    from hil.controller.projects.doctor.checks import check_environment

    done: list[EnvironmentCheck] = []
    hidden = 0
    for one in check_environment(Path(), runs_model=not quick):
        done.append(one)
        if as_json:
            continue
        if one.name.startswith(_PACKAGE) and one.state == PASS and not every:
            hidden += 1
            continue
        if hidden:
            _print_check(EnvironmentCheck("packages", PASS, f"{hidden} required packages (hil doctor --all)"))
            hidden = 0
        _print_check(one)
    failed = [one.name for one in done if one.state == FAIL]
    code = EXIT_USAGE if failed else EXIT_OK
    line = f"FAIL: {', '.join(failed)}" if failed else "everything that hil requires works"
    return answer(as_json, DoctorReport(ok=not failed, checks=done, exit_code=code), line)


def _print_check(check: EnvironmentCheck) -> None:
    word = check.state.upper() if check.state == FAIL else check.state
    click.echo(f"{word:5} {check.name:23} {check.found}")
    if check.fix:
        click.echo(f"{'':29} fix: {check.fix}")
