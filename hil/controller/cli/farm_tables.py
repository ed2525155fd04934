"""A farm's answers as tables for the terminal: aligned, cut to its width, and whole where stdout is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from hil.controller.cli.farm_options import UNITS
from hil.controller.farm.messages import BoardState, JobState, Kind
from hil.core.text import visible

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

Row = Mapping[str, Any]
_STYLES = {
    BoardState.ONLINE.value: "green",
    BoardState.SUSPECT.value: "yellow",
    BoardState.QUARANTINED.value: "red",
    BoardState.OFFLINE.value: "dim",
    BoardState.DRAINING.value: "blue",
    BoardState.MAINTENANCE.value: "blue",
    JobState.QUEUED.value: "dim",
    JobState.RUNNING.value: "cyan",
    JobState.CANCELLED.value: "yellow",
}
_OWN_COLUMN = ("name", "site", "host", "hw_type")
_BYTES = ("mem", "memory", "disk")
# What nobody looks for in a table of boards; selectors know them all the same.
_DETAILS = ("agent", "devices", "features", "kernel", "libc", "system")
_GOOD = ("PASS", "XFAIL", "SKIP", "")


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    head: str  # what stands above it
    cell: Callable[[Row], tuple[str, str]]  # a row's text, and its style
    least: int = 0  # it is left out where the terminal has fewer characters
    right: bool = False  # whether it is of numbers
    firm: bool = False  # whether others are cut before it


def show(*parts: RenderableType) -> None:
    """Print tables and lines to stdout; into a pipe without blanks at the ends of lines."""
    from hil.controller.storage.console import table_console

    out = table_console()
    with out.capture() as captured:
        for part in parts:
            out.print(part)
    lines = captured.get().splitlines()
    for line in lines if out.is_terminal else map(str.rstrip, lines):
        out.file.write(f"{line}\n")
    out.file.flush()


def table(columns: Sequence[Column], rows: Iterable[Row], width: int | None = None) -> Table:
    """Rows as a table of at most ``width`` characters; None is what stdout has."""
    from hil.controller.storage import texts
    from hil.controller.storage.console import table_console

    room = table_console().width if width is None else width
    shown = [column for column in columns if column.least <= room]
    heads = [column.head for column in shown]
    numbers = [column.head for column in shown if column.right]
    whole = [column.head for column in shown if column.firm]
    cells = ([line(column.cell(row)) for column in shown] for row in rows)
    return texts.table(heads, cells, numbers=numbers, whole=whole)


def line(*parts: tuple[str, str] | str) -> Text:
    """A line of texts, some with a style; cut where the terminal ends."""
    from rich.text import Text

    return Text.assemble(
        *((plain(one), "") if isinstance(one, str) else (plain(one[0]), one[1]) for one in parts),
        no_wrap=True,
        overflow="ellipsis",
    )


def plain(text: str) -> str:
    """A text on one line: titles and reasons are other people's."""
    return visible(text).translate({ord("\n"): " ", ord("\t"): " "})


def jobs_table(rows: Sequence[Row], now: datetime, width: int | None = None) -> Table:
    """Jobs: what, where, for whom, how long they waited and ran, and how they ended."""
    columns = [
        Column("JOB", lambda job: (job["name"], "bold"), firm=True),
        Column("STATE", lambda job: _styled(job["state"]), firm=True),
        Column("TITLE", lambda job: (job["title"], "")),
        Column("KIND", lambda job: (job["kind"], ""), least=110),
        Column("USER", lambda job: (_owner(job), ""), least=70),
        Column("PRIORITY", lambda job: (job["priority"], ""), least=90),
        Column("BOARD", lambda job: (job["board"], "")),
        Column("WAITED", lambda job: (_waited(job, now), ""), right=True, firm=True, least=60),
        Column("RAN", lambda job: (_ran(job, now), ""), right=True, firm=True, least=60),
        Column("RESULT", _result),
    ]
    return table(columns, rows, width)


def attempts_table(rows: Sequence[Row], now: datetime, width: int | None = None) -> Table:
    """The attempts at a job: where, when, how long, and how they ended."""
    columns = [
        Column("ATTEMPT", lambda one: (str(rows.index(one) + 1), ""), right=True, firm=True),
        Column("BOARD", lambda one: (one["board"], "bold")),
        Column("FROM", lambda one: (local(one["granted_at"]), "dim"), firm=True, least=60),
        Column("HELD", lambda one: (_held(one, now), ""), right=True, firm=True),
        Column("FENCE", lambda one: (str(one["fence"]), "dim"), right=True, firm=True, least=80),
        Column("END", lambda one: (one["reason"], "")),
    ]
    return table(columns, rows, width)


def boards_table(rows: Sequence[Row], now: datetime, width: int | None = None, *, labels: bool = True) -> Table:
    """Boards: how they are and why, what runs there, and with ``labels`` what people look for of what selectors see."""
    columns = [
        Column("BOARD", lambda board: (board["name"], "bold"), firm=True),
        Column("STATE", lambda board: _styled(board["state"]), firm=True),
        Column("JOB", _on_board, firm=True),
        Column("USER", lambda board: (board["user"] if board["job"] else "", ""), least=60),
        Column("SINCE", lambda board: (_since(board["since"], now), ""), right=True, firm=True, least=60),
        Column("HOST", lambda board: ("/".join(filter(None, (board["site"], board["host"]))), ""), least=90),
        Column("TYPE", lambda board: (board["hw_type"], ""), least=80),
    ]
    if any(board["reason"] for board in rows):
        columns.append(Column("REASON", lambda board: (board["reason"], "yellow")))
    if labels:
        columns.append(Column("LABELS", lambda board: (said_labels(board["labels"]), "dim")))
    return table(columns, rows, width)


def events_table(rows: Sequence[Row], width: int | None = None) -> Table:
    """What happened, and why."""
    columns = [
        Column("TIME", lambda event: (local(event["at"]), "dim"), firm=True),
        Column("EVENT", lambda event: (event["what"], _STYLES.get(event["what"].rpartition(".")[2], "")), firm=True),
        Column("BOARD", lambda event: (event["board"], "")),
        Column("JOB", lambda event: (event["job"], "")),
        Column("REASON", lambda event: (event["reason"], "")),
    ]
    return table(columns, rows, width)


def users_table(rows: Sequence[Row], width: int | None = None) -> Table:
    """Who has boards, waits for them, and had them; who has most first."""
    columns = [
        Column("USER", lambda user: (user["user"], "bold")),
        Column("PROJECT", lambda user: (user["project"], "")),
        Column("RUNNING", lambda user: (str(user["running"]), ""), right=True, firm=True),
        Column("QUEUED", lambda user: (str(user["queued"]), ""), right=True, firm=True),
        Column("BOARD TIME", lambda user: (duration(user["board_s"]), ""), right=True, firm=True),
    ]
    return table(columns, sorted(rows, key=lambda user: (-user["running"], -user["board_s"], user["user"])), width)


def summary(stats: Mapping[str, Any], busy: int | None = None) -> list[Text]:
    """A line about the jobs and one about the boards."""
    jobs, queue = stats["jobs"], {name: count for name, count in stats["queue"].items() if count}
    classes = f" ({', '.join(f'{count} {name}' for name, count in queue.items())})" if set(queue) - {"normal"} else ""
    told = [f"{jobs.get(state.value, 0)} {state.value}" for state in JobState]
    told[0] += classes
    some = [(f"{count} {state}", _STYLES.get(state, "")) for state, count in stats["boards"].items() if count]
    boards = [part for one in some for part in (one, ", ")][:-1] or ["none"]
    return [
        line(("jobs:   ", "bold"), ", ".join(told)),
        line(("boards: ", "bold"), *boards, "" if busy is None else f"; {busy} busy"),
    ]


def latency(stats: Mapping[str, Any]) -> Text:
    """How long jobs waited for a board."""
    half, most = stats["waiting_s"]["p50"], stats["waiting_s"]["p95"]
    told = "no job began lately" if half is None else f"half within {duration(half)}, 95 of 100 within {duration(most)}"
    return line(("waited: ", "bold"), told)


def said_labels(labels: Mapping[str, Any], wide: bool = False) -> str:
    """``chip=a53 gpu mem=2GiB runtimes=iree,onnxruntime``, as a selector writes them; ``wide``: also technical ones."""
    from hil.controller.farm.selector import quoted, said

    def one(name: str, value: Any) -> str:
        if value is True:
            return name
        if not isinstance(value, (list, tuple)):
            return f"{name}={quoted(said(value, ('1B',) if name in _BYTES else ()))}"
        return f"{name}={','.join(quoted(said(each)) for each in value)}"

    left_out = _OWN_COLUMN if wide else (*_OWN_COLUMN, *_DETAILS)
    return " ".join(one(name, value) for name, value in sorted(labels.items()) if name not in left_out)


def duration(seconds: float) -> str:
    """``0.02s``, ``12s``, ``4m10s``, ``3h05m``, ``2d04h``."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.2f}s"
    whole = round(seconds)
    for big, small in (("d", "h"), ("h", "m"), ("m", "s")):
        if whole >= UNITS[big]:
            return f"{whole // UNITS[big]}{big}{whole % UNITS[big] // UNITS[small]:02d}{small}"
    return f"{whole}s"


def moment(text: str | None) -> datetime | None:
    """A time of the farm's."""
    return datetime.fromisoformat(text) if text else None


def local(text: str) -> str:
    """A time of the farm's on the clock here."""
    at = moment(text)
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S") if at else ""


def utc_now() -> datetime:
    """The time, as the farm's are compared with."""
    return datetime.now(timezone.utc)


def _styled(state: str) -> tuple[str, str]:
    return state, _STYLES.get(state, "")


def _owner(job: Row) -> str:
    return f"{job['user']}/{job['project']}" if job["project"] else str(job["user"])


def _since(text: str | None, now: datetime) -> str:
    at = moment(text)
    return duration((now - at).total_seconds()) if at else ""


def _waited(job: Row, now: datetime) -> str:
    queued, until = moment(job["queued_at"]), moment(job["started_at"]) or moment(job["finished_at"]) or now
    return duration((until - queued).total_seconds()) if queued else ""


def _ran(job: Row, now: datetime) -> str:
    begun, until = moment(job["started_at"]), moment(job["finished_at"]) or now
    return duration((until - begun).total_seconds()) if begun else ""


def _held(attempt: Row, now: datetime) -> str:
    begun, until = moment(attempt["granted_at"]), moment(attempt["ended_at"]) or now
    return duration((until - begun).total_seconds()) if begun else ""


def _result(job: Row) -> tuple[str, str]:
    """How it ended; of one that waits, what for."""
    if job["state"] == JobState.QUEUED.value:
        wish = f"for {job['selector']}" if job["selector"] else ""
        again = f"again: {job['reason']}" if job["attempts"] else ""
        return "; ".join(filter(None, (again, wish))), "dim"
    if job["exit_code"] is None:
        return (f"attempt {job['attempts']}" if job["attempts"] > 1 else ""), "dim"
    good = job["outcome"] in _GOOD and not job["exit_code"]
    outcome = job["outcome"] or ("" if good else f"exit {job['exit_code']}")
    return " ".join(filter(None, (outcome, job["reason"]))), "green" if good else "red"


def _on_board(board: Row) -> tuple[str, str]:
    check = board["job"] and board["user"] == "farm" and Kind.HEALTH.value
    return (f"{board['job']} ({check})" if check else board["job"]), "cyan"
