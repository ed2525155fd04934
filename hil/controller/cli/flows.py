"""`hil flows`: list the flows for `--flow`."""

from __future__ import annotations

from pathlib import Path

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import FILE, json_option
from hil.controller.cli.screen import answer


@make_command(epilog="Example: hil flows my.toml --json")
@click.argument("file", required=False, type=FILE, metavar="[FILE.toml]")
@json_option
def flows(file: Path | None, as_json: bool) -> None:
    """List the flows of hil, of installed packages and of ./flows.toml, or the flows of a file."""
    from hil.controller.models.flows.flow_registry import load_flows as known_flows
    from hil.controller.models.flows.flow_registry import read_flows
    from hil.controller.records.commands.models import BrokenFlow, FlowList, FlowSettings
    from hil.controller.storage.sources.packages import Registered

    found = known_flows() if file is None else read_flows(file)
    width = max(map(len, found), default=0)
    lines = [f"{name:{width}}  {flow.description or flow.runtime}" for name, flow in found.items()]
    broken = found.broken if isinstance(found, Registered) else {}
    lines += [f"{name}: unusable: {error.message}" for name, error in broken.items()]
    document = FlowList(flows=[FlowSettings(**vars(flow)) for flow in found.values()])
    if broken:
        document.broken = [BrokenFlow(name=name, error=error.message) for name, error in broken.items()]
    answer(as_json, document, *lines)
