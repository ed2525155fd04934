"""`hil farm drain` and `resume`: take a board, or all boards of a host, out of service and back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.farm.options import connect_farm
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.farm.messages import BoardState
from hil.controller.records.base import Record
from hil.controller.records.commands.farm import BoardStateChange, HostStateChange
from hil.controller.records.lab.farm import FarmBoard
from hil.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from hil.controller.farm.client.client import FarmClient

_LOOK_SECONDS = 0.5
_host = click.option("--host", default="", metavar="HOST", help="All boards of this host, in place of BOARD.")


@make_command(
    epilog="""\b
Examples:
  hil farm drain rpi5-3 --reason 'new cable'
  hil farm drain --host berlin-1 --reason upgrade --wait"""
)
@click.argument("board", default="")
@_host
@click.option("--reason", default="", metavar="TEXT", help="Reason shown to other users.")
@click.option("--wait", "waits", is_flag=True, help="Wait until the running jobs have ended.")
@json_option
def drain(board: str, host: str, reason: str, waits: bool, as_json: bool) -> int:
    """Start no new jobs on BOARD, or on all boards of a host. Running jobs may finish.

    Ctrl-C ends only the wait. The boards remain drained up to `hil farm resume`, also if their host restarts.
    """
    with connect_farm() as farm:
        names = _choose_boards(farm, board, host)
        for name in names:
            farm.do("drain", name=name, reason=reason)
        states = _wait_until_idle(farm, names) if waits else _read_states(farm, names)
    text = [
        f"{name} is {'drained' if state == BoardState.MAINTENANCE.value else 'draining: a job is still running on it'}"
        for name, state in states.items()
    ]
    return answer(as_json, _make_document(host, states), *text)


@make_command(
    epilog="""\b
Examples:
  hil farm resume rpi5-3
  hil farm resume --host berlin-1"""
)
@click.argument("board", default="")
@_host
@json_option
def resume(board: str, host: str, as_json: bool) -> int:
    """Make BOARD, or all boards of a host, available to jobs. A quarantined board is checked immediately."""
    with connect_farm() as farm:
        names = _choose_boards(farm, board, host)
        for name in names:
            farm.do("resume", name=name)
        states = _read_states(farm, names)
    return answer(as_json, _make_document(host, states), *(f"{name} is {state}" for name, state in states.items()))


def _choose_boards(farm: FarmClient, board: str, host: str) -> list[str]:
    """Return the names of the boards to change. Raises UsageError for an unknown host."""
    if bool(board) == bool(host):
        raise UsageError("specify BOARD or --host", hint="hil farm boards lists the boards and their hosts")
    if board:
        return [board]
    rows: list[FarmBoard] = farm.ask("boards")
    if names := [row.name for row in rows if row.host == host]:
        return names
    hosts = sorted({row.host for row in rows})
    hint = f"{did_you_mean(host, hosts)}known hosts: {', '.join(hosts) or 'none'}"
    raise UsageError(f"host {host!r} not found", hint=hint)


def _read_states(farm: FarmClient, names: Sequence[str]) -> dict[str, str]:
    rows: list[FarmBoard] = farm.ask("boards")
    states: dict[str, str] = {row.name: row.state for row in rows}
    return {name: states.get(name, "unknown") for name in names}


def _wait_until_idle(farm: FarmClient, names: Sequence[str]) -> dict[str, str]:
    """Return the states of drained boards when no job runs on them."""
    reported: set[str] = set()
    while True:
        rows: list[FarmBoard] = farm.ask("boards")
        jobs = {row.name: row.job for row in rows if row.name in names and row.job}
        if not jobs:
            return _read_states(farm, names)
        for name, job in jobs.items():
            if job not in reported:
                reported.add(job)
                print_message(f"waiting for job {job} on {name}")
        time.sleep(_LOOK_SECONDS)


def _make_document(host: str, states: Mapping[str, str]) -> Record:
    if host:
        return HostStateChange(host=host, boards=dict(states))
    [(board, state)] = states.items()
    return BoardStateChange(board=board, state=state)
