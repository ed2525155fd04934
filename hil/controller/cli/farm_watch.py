"""`hil farm watch`: the boards and the queue as they are, again and again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.farm_options import connected
from hil.controller.farm.messages import BoardState, JobState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hil.controller.farm.client import FarmClient

Row = Mapping[str, Any]
_JOBS_LEAST = 20
# An event comes at most so far behind later ones.
_BEHIND = 500
# So many events are read at a time, and more where that was not all.
_EVENTS = (200, 5_000, 100_000)
# Lines beside the two tables: what is said above them, their heads, a line between them, and the cursor's.
_OTHER_LINES = 8
_LINES_LEAST = 4


@click.command(epilog="Example: hil farm watch")
@click.option(
    "--every",
    "every_s",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.1, 3600),
    metavar="S",
    help="How often to look.",
)
@click.option("--json", "as_json", is_flag=True, help="Each event as a JSON document, on a line of its own.")
def watch(every_s: float, as_json: bool) -> int:
    """Show the boards and the queue live; Ctrl-C ends it.

    Where stdout is no terminal, each event is a line, as it happens.
    """
    from hil.controller.storage.console import table_console

    with connected() as farm:
        try:
            if table_console().is_terminal and not as_json:
                _live(farm, every_s)
            else:
                _lines(farm, every_s, as_json)
        except KeyboardInterrupt:
            pass
    return 0


def _live(farm: FarmClient, every_s: float) -> None:
    from rich.live import Live

    from hil.controller.storage.console import table_console

    out = table_console()
    with Live(console=out, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            live.update(look(farm, *out.size), refresh=True)
            time.sleep(max(every_s - (time.monotonic() - began), 0.05))


def look(farm: FarmClient, width: int, height: int) -> RenderableType:
    """The farm now, as it fits into a terminal."""
    from hil.controller.cli.farm_tables import utc_now

    jobs = [job for state in JobState for job in farm.ask("jobs", state=[state.value], limit=max(height, _JOBS_LEAST))]
    return view(farm.ask("stats"), farm.ask("boards"), jobs, utc_now(), width, height)


def view(
    stats: Row, boards: Sequence[Row], jobs: Sequence[Row], now: datetime, width: int, height: int
) -> RenderableType:
    """The farm in at most so many lines: boards that are not well or busy first, then jobs that run, wait, ended."""
    from rich.console import Group

    from hil.controller.cli.farm_tables import boards_table, jobs_table, latency, line, summary

    lines = max(height - _OTHER_LINES, _LINES_LEAST)
    by_state = {state: [job for job in jobs if job["state"] == state.value] for state in JobState}
    ended = sorted(by_state[JobState.DONE] + by_state[JobState.CANCELLED], key=lambda job: str(job["finished_at"]))
    ordered = [*by_state[JobState.RUNNING], *by_state[JobState.QUEUED], *reversed(ended)]
    for_boards = max(lines - len(ordered), lines // 2)
    some_boards = _fitting(sorted(boards, key=_interest), for_boards)
    more_boards = len(boards) - len(some_boards)
    some_jobs = _fitting(ordered, lines - len(some_boards) - bool(more_boards))
    open_jobs = sum(stats["jobs"].get(state.value, 0) for state in (JobState.QUEUED, JobState.RUNNING))
    more_jobs = open_jobs - sum(not job["finished_at"] for job in some_jobs)
    parts: list[RenderableType] = [*summary(stats, sum(bool(board["job"]) for board in boards)), latency(stats)]
    parts += [line(""), boards_table(some_boards, now, width, labels=False)]
    parts += [line((f"... and {more_boards} more", "dim"))] if more_boards else []
    parts += [line(""), jobs_table(some_jobs, now, width)] if some_jobs else []
    parts += [line((f"... and {more_jobs} more that run or wait", "dim"))] if more_jobs > 0 else []
    return Group(*parts)


def _fitting(rows: Sequence[Row], lines: int) -> Sequence[Row]:
    """As many rows as there are lines; if that is not all, one less, for the line that says so."""
    return rows if len(rows) <= lines else rows[: max(lines - 1, 0)]


def _interest(board: Row) -> tuple[bool, bool, str]:
    well = board["state"] in (BoardState.ONLINE.value, BoardState.MAINTENANCE.value, BoardState.OFFLINE.value)
    return well, not board["job"], board["name"]


def _lines(farm: FarmClient, every_s: float, as_json: bool) -> None:
    """Each event as it happens."""
    from hil.controller.cli.farm_tables import local, plain

    told = Told({event["id"] for event in farm.ask("events", limit=_BEHIND)})
    while True:
        time.sleep(every_s)
        for event in told.since(farm):
            if as_json:
                click.echo(json.dumps(event))
            else:
                where = " ".join(filter(None, (event["what"], event["job"], event["board"])))
                click.echo(f"{local(event['at'])}  {plain(where)}{plain(event['reason'] and ': ' + event['reason'])}")


class Told:
    """Tells events by their numbers, each once. One that was written with later ones may come after them."""

    def __init__(self, numbers: set[int]) -> None:
        self._numbers, self._lowest = numbers, min(numbers, default=0)

    def since(self, farm: FarmClient) -> list[dict[str, Any]]:
        """The events that were not told yet: all of them, however many there are."""
        for limit in _EVENTS:
            found = farm.ask("events", limit=limit)
            new = [event for event in found if event["id"] > self._lowest and event["id"] not in self._numbers]
            if len(new) < limit:
                break
        self._numbers |= {event["id"] for event in new}
        self._lowest = max(self._lowest, max(self._numbers, default=0) - _BEHIND)
        self._numbers = {number for number in self._numbers if number >= self._lowest}
        return new
