"""`hil plugin`: check packages that extend hil."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import group
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.usage.candidates import complete_file
from hil.core.scratch import make_temporary_folder

if TYPE_CHECKING:
    from hil.controller.records.commands.plugins import PluginReport, PluginViolation

# Maximum number of violations of one rule by one entry point in the output.
_MAX_SHOWN = 3


@group()
def plugin() -> None:
    """Check packages that extend hil."""


@plugin.command(epilog="Examples: hil plugin check ./hil-acme; hil plugin check hil-acme --json")
@click.argument("package", metavar="DIR|WHEEL|NAME", shell_complete=complete_file)
@click.option(
    "--timeout",
    "timeout_s",
    default=60.0,
    show_default=True,
    type=click.FloatRange(1.0),
    metavar="S",
    help="Time limit for each call of the package.",
)
@json_option
def check(package: str, timeout_s: float, as_json: bool) -> int:
    """Check a package against the contract of hil's entry points.

    The package is a project directory, a wheel or the name of an installed package. hil calls its code in separate
    processes with time limits. docs/plugin-contract.md lists the rules.

    Exit code: 0 without violations, 1 with violations, 2 if the package does not exist or cannot be built.
    """
    from hil.controller.workloads.plugin_check.packages import open_package
    from hil.controller.workloads.plugin_check.suite import check_package

    with make_temporary_folder("hil-plugin-") as place:
        folder = Path(place)
        found = open_package(package, folder)
        report = check_package(found, folder, timeout_s=timeout_s, say=print_message)
    return answer(as_json, report, *_iter_lines(report))


def _iter_lines(report: PluginReport) -> Iterator[str]:
    alike: dict[tuple[str, str], list[PluginViolation]] = {}
    for one in report.violations:
        alike.setdefault((one.rule, one.entry_point), []).append(one)
    for (rule, point), violations in alike.items():
        yield f"VIOLATION  {rule}  {point}"
        for one in violations[:_MAX_SHOWN]:
            yield f"  found     {one.found}"
        if len(violations) > _MAX_SHOWN:
            yield f"            and {len(violations) - _MAX_SHOWN} more (--json)"
        yield f"  expected  {violations[0].expected}"
        yield f"  see       {violations[0].documentation}"
    for skip in report.skipped:
        yield f"skipped    {skip.entry_point}, {skip.what}: {skip.why}"
    count = len(report.violations)
    text = f"{count} violation{'s' * (count != 1)}" if count else "no violations"
    tried = f"operators tried: {', '.join(report.operators)}" if report.operators else "no operators tried"
    missing = ", ".join(f"{skip.what} of {skip.entry_point}" for skip in report.skipped)
    text = "; ".join([text, tried, *([f"not checked: {missing}"] if missing else ())])
    yield f"{report.package} {report.version}: {report.checks} checks, {text}"
