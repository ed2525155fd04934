"""`hil suite`: many cases through one flow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hil.controller.cli.options import json_option
from hil.controller.cli.suite_run import run, suite_options

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group(epilog="Example: hil suite run models --flow iree")
def suite() -> None:
    """Run suites of models and their layers, know what is expected to fail, and compare runs."""


suite.add_command(run)


@suite.command("list", epilog="Example: hil suite list operators --filter 'conv*'")
@click.argument("source", metavar="operators|models|PATH")
@suite_options
@json_option
def list_cases(source: str, as_json: bool, flow: str, **settings: Any) -> int:
    """List a suite's cases. PATH is a model, or a folder of models."""
    from hil.controller.cli.screen import print_json
    from hil.controller.models.flows import load_flow
    from hil.controller.pipeline.case import Workshop
    from hil.controller.storage.cache import Cache
    from hil.controller.storage.isolated import Isolated
    from hil.controller.workloads.suites.job import suite_of
    from hil.controller.workloads.suites.request import Request
    from hil.errors import EXIT_NOTHING_RAN, EXIT_OK

    request = Request(source, flow, **{**settings, "dims": settings["dims"]})
    with Isolated() as isolated:
        found = suite_of(request, load_flow(flow), Workshop(Cache(), isolated))
    cases = [spec for spec in found.cases if request.selects(spec)]
    code = EXIT_OK if cases else EXIT_NOTHING_RAN
    for line in found.left_out:
        click.echo(f"left out: {line}", err=True)
    if as_json:
        rows = [{"id": one.id, "model": one.model, "layer": one.layer, "op": one.op} for one in cases]
        print_json({"schema": 1, "suite": found.name, "cases": rows, "exit_code": code})
    else:
        for one in cases:
            click.echo(one.id)
    return code


@suite.command(epilog="Example: hil suite expect hil-suites/latest-run --update")
@click.argument("folder", type=_FOLDER, metavar="RUN")
@click.option("--update", is_flag=True, help="Rewrite the file; without it, show what would change.")
@click.option(
    "--file", "path", type=click.Path(path_type=Path), metavar="FILE", help="The file (default: the suite's own)."
)
def expect(folder: Path, update: bool, path: Path | None) -> None:
    """Bring the list of expected failures in line with what a RUN came to.

    Reasons and issues that are written down stay; what passes now goes; cases, flows and boards that the RUN did not
    include are left alone.
    """
    from hil.controller.workloads.suites.job import expect_from

    text = expect_from(folder, path, update=update)
    click.echo(text.rstrip() or "nothing to change")


@suite.command(epilog="Example: hil suite diff hil-suites/monday hil-suites/tuesday --json")
@click.argument("first", type=_FOLDER, metavar="RUN1")
@click.argument("second", type=_FOLDER, metavar="RUN2")
@click.option("--markdown", is_flag=True, help="As Markdown, for a CI job's summary.")
@json_option
def diff(first: Path, second: Path, markdown: bool, as_json: bool) -> int:
    """What broke, what was mended, and what changed by how much from RUN1 to RUN2.

    Ends with 1 where something broke, or a case that is new fails.
    """
    from hil.controller.cli.screen import print_json
    from hil.controller.storage.console import Console
    from hil.controller.workloads.suites.reports import diff_markdown, diff_runs, print_diff
    from hil.errors import EXIT_FAIL, EXIT_OK

    found = diff_runs(first, second)
    code = EXIT_FAIL if found.is_worse else EXIT_OK
    if as_json:
        print_json({"schema": 1, **found.to_json(), "exit_code": code})
    elif markdown:
        click.echo(diff_markdown(found))
    else:
        print_diff(Console(), found)
    return code


@suite.command(epilog="Example: hil suite report hil-suites/monday")
@click.argument("folder", type=_FOLDER, metavar="RUN")
def report(folder: Path) -> None:
    """Write a RUN's reports again from its results, and show its summary."""
    from hil.controller.storage.console import Console
    from hil.controller.workloads.suites.reports import print_summary, write_reports

    write_reports(folder)
    print_summary(Console(), folder)
