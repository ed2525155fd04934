"""`hil flows`: the flows that `--flow` takes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from hil.controller.cli.options import json_option


@click.command(epilog="Example: hil flows my.toml --json")
@click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[FILE.toml]")
@json_option
def flows(file: Path | None, as_json: bool) -> None:
    """List the flows: hil's own, those of installed packages, those of ./flows.toml; or those of a file."""
    from hil.controller.cli.screen import print_json
    from hil.controller.models.flows import flows as known_flows
    from hil.controller.models.flows import read_flows

    found = known_flows() if file is None else read_flows(file)
    if as_json:
        print_json({"schema": 1, "flows": [asdict(flow) for flow in found.values()]})
        return
    width = max(len(name) for name in found)
    for name, flow in found.items():
        click.echo(f"{name:{width}}  {flow.description or flow.runtime}")
