"""Format tables of farm data for the terminal.

Tables are truncated to the terminal's width. If stdout is not a terminal, tables are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Generic, TypeVar

from hil.controller.farm.client.turns import turn_text
from hil.controller.farm.client.wording import format_duration, format_labels
from hil.controller.farm.messages import BoardState, JobState, Kind
from hil.controller.records.lab.farm import (
    AuditEntry,
    BoardPermission,
    FarmAttempt,
    FarmBoard,
    FarmEvent,
    FarmJob,
    FarmReservation,
    FarmStats,
    FarmToken,
    UserStats,
)
from hil.controller.records.lab.webhooks import WebhookStatus
from hil.core.text import escape_controls

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

R = TypeVar("R")
# A text, with or without a style.
Part = tuple[str, str] | str
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
_GOOD = ("PASS", "XFAIL", "")
# Maximum quarantined boards in a summary.
_SHOWN = 5


@dataclass(frozen=True)
class Column(Generic[R]):
    """Column of a table."""

    head: str  # header
    cell: str | Callable[[R], Part]  # field of the row, or a function that takes the row
    style: str = ""
    least: int = 0  # minimum terminal width for this column, in characters
    number: bool = False  # right-aligned and never truncated
    firm: bool = False  # True to truncate other columns first

    def format_cell(self, row: R) -> Text:
        """Return a row's cell, with a style for the whole cell."""
        from rich.text import Text

        found = getattr(row, self.cell) if isinstance(self.cell, str) else self.cell(row)
        text, style = found if isinstance(found, tuple) else (str(found), self.style)
        return Text(make_plain(text), style, no_wrap=True, overflow="ellipsis")


def show(*parts: object) -> None:
    """Print tables and lines to stdout. Strip trailing spaces if it is not a terminal."""
    from hil.controller.storage.screen.console import make_table_console

    out = make_table_console()
    with out.capture() as captured:
        for part in parts:
            out.print(part)
    printed = captured.get().splitlines()
    for text in printed if out.is_terminal else map(str.rstrip, printed):
        out.file.write(f"{text}\n")
    out.file.flush()


def make_table(columns: Sequence[Column[R]], rows: Iterable[R], width: int | None = None) -> Table:
    """Return rows as a table of at most ``width`` characters; None is stdout's width."""
    from hil.controller.storage.screen import texts
    from hil.controller.storage.screen.console import make_table_console

    room = make_table_console().width if width is None else width
    shown = [column for column in columns if column.least <= room]
    return texts.make_table(
        [column.head for column in shown],
        [[column.format_cell(row) for column in shown] for row in rows],
        numbers=[column.head for column in shown if column.number],
        whole=[column.head for column in shown if column.firm],
    )


def line(*parts: Part) -> Text:
    """Return a line of text parts with optional styles. The line is truncated at the terminal's width."""
    from rich.text import Text

    styled = ((one, "") if isinstance(one, str) else one for one in parts)
    return Text.assemble(*((make_plain(text), style) for text, style in styled), no_wrap=True, overflow="ellipsis")


def make_plain(text: str) -> str:
    """Return untrusted text, such as titles and reasons, as a single visible line."""
    return escape_controls(text).translate({ord("\n"): " ", ord("\t"): " "})


def make_boards_table(rows: Sequence[FarmBoard], width: int | None = None, *, labels: bool = True) -> Table:
    """Return a table of boards with states, reasons and jobs. ``labels`` adds the main labels."""
    columns: list[Column[FarmBoard]] = [
        Column("BOARD", "name", "bold", firm=True),
        Column("STATE", _state, firm=True),
        Column("JOB", _format_use, "cyan", firm=True),
        Column("USER", lambda board: board.user if board.job else "", least=60),
        Column("SINCE", lambda board: _format_span(board.since), number=True, least=60),
        Column("HOST", lambda board: "/".join(filter(None, (board.site, board.host))), least=90),
        Column("TYPE", "hw_type", least=80),
    ]
    if any(board.reason for board in rows):
        columns.append(Column("REASON", "reason", "yellow"))
    if labels:
        columns.append(Column("LABELS", lambda board: format_labels(board.labels), "dim"))
    return make_table(columns, rows, width)


def summarize_farm(stats: FarmStats, busy: int | None = None) -> list[Text]:
    """Return a line about the jobs and a line about the boards."""
    jobs, queue = stats.jobs, {name: count for name, count in stats.queue.items() if count}
    classes = f" ({', '.join(f'{count} {name}' for name, count in queue.items())})" if set(queue) - {"normal"} else ""
    counts = [f"{jobs.get(state.value, 0)} {state.value}" for state in JobState]
    counts[0] += classes
    some = [(f"{count} {state}", _STYLES.get(state, "")) for state, count in stats.boards.items() if count]
    boards = [part for one in some for part in (one, ", ")][:-1] or ["none"]
    return [
        line(("jobs:   ", "bold"), ", ".join(counts)),
        line(("boards: ", "bold"), *boards, "" if busy is None else f"; {busy} busy"),
    ]


def list_quarantined(boards: Sequence[FarmBoard]) -> list[Text]:
    """Return a line with the reason for the first quarantined boards."""
    found = [board for board in boards if board.state == BoardState.QUARANTINED.value]
    lines = [line((f"  {board.name} ", "red"), board.reason) for board in found[:_SHOWN]]
    more = len(found) - _SHOWN
    return [*lines, *([line((f"  and {more} more: hil farm boards", "dim"))] if more > 0 else [])]


def describe_latency(stats: FarmStats) -> Text:
    """Return a line with the queueing times of jobs."""
    half, most = stats.waiting_s.p50, stats.waiting_s.p95
    text = "no job started recently"
    if half is not None and most is not None:
        text = f"median {format_duration(half)}, 95th percentile {format_duration(most)}"
    return line(("waited: ", "bold"), text)


def to_local_time(text: str | None) -> str:
    """Convert a farm timestamp to local time; "" for none."""
    return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}" if text else ""


def get_utc_now() -> datetime:
    """Return the current time in UTC, as farm timestamps use."""
    return datetime.now(timezone.utc)


def _format_span(begun: str | None, *ends: str | None) -> str:
    """Return the time from ``begun`` to the first end that is given, or to now; "" if not begun."""
    if not begun:
        return ""
    end = next(filter(None, ends), None)
    until = datetime.fromisoformat(end) if end else get_utc_now()
    return format_duration((until - datetime.fromisoformat(begun)).total_seconds())


def _state(row: FarmJob | FarmBoard) -> Part:
    return row.state, _STYLES.get(row.state, "")


def _format_owner(job: FarmJob) -> str:
    return f"{job.user}/{job.project}" if job.project else job.user


def _format_result(job: FarmJob) -> Part:
    """Return a job's result, or the reason why it waits."""
    if job.state == JobState.QUEUED.value:
        wish = f"for {job.selector}" if job.selector else ""
        again = f"again: {job.reason}" if job.attempts else ""
        return "; ".join(filter(None, (turn_text(job), again, wish))), "dim"
    if job.exit_code is None:
        return (f"attempt {job.attempts}" if job.attempts > 1 else ""), "dim"
    if job.outcome == "SKIP":
        return f"SKIP {job.reason}", "yellow"
    good = job.outcome in _GOOD and not job.exit_code
    outcome = job.outcome or ("" if good else f"exit {job.exit_code}")
    return " ".join(filter(None, (outcome, job.reason))), "green" if good else "red"


def _format_access(one: BoardPermission) -> str:
    names = [*one.access.users, *(f"group {group}" for group in one.access.groups)]
    return ", ".join(names) or "everyone"


def _format_use(board: FarmBoard) -> str:
    check = board.job and board.user == "farm" and Kind.HEALTH.value
    return f"{board.job} ({check})" if check else board.job


def _format_event(event: FarmEvent) -> Part:
    return event.what, _STYLES.get(event.what.rpartition(".")[2], "")


def _describe_token(token: FarmToken) -> str:
    return "good" if token.good else "revoked" if token.revoked_at else "expired"


def _format_audit_entry(entry: AuditEntry) -> str:
    refused = "" if entry.allowed else f"REFUSED: {entry.detail.get('reason', '')}"
    return "  ".join(filter(None, (f"{entry.action} {entry.object}".strip(), entry.peer, refused)))


JOBS: tuple[Column[FarmJob], ...] = (
    Column("JOB", "name", "bold", firm=True),
    Column("STATE", _state, firm=True),
    Column("TITLE", "title"),
    Column("KIND", "kind", least=110),
    Column("USER", _format_owner, least=70),
    Column("PRIORITY", "priority", least=90),
    Column("BOARD", lambda job: ", ".join(job.boards) or job.board),
    Column("WAITED", lambda job: _format_span(job.queued_at, job.started_at, job.finished_at), number=True, least=60),
    Column("RAN", lambda job: _format_span(job.started_at, job.finished_at), number=True, least=60),
    Column("RESULT", _format_result),
)
# A row consists of a number and an attempt.
ATTEMPTS: tuple[Column[tuple[int, FarmAttempt]], ...] = (
    Column("ATTEMPT", lambda row: str(row[0]), number=True),
    Column("BOARD", lambda row: row[1].board, "bold"),
    Column("FROM", lambda row: to_local_time(row[1].granted_at), "dim", firm=True, least=60),
    Column("HELD", lambda row: _format_span(row[1].granted_at, row[1].ended_at), number=True),
    Column("FENCE", lambda row: str(row[1].fence), "dim", number=True, least=80),
    Column("END", lambda row: row[1].reason),
)
EVENTS: tuple[Column[FarmEvent], ...] = (
    Column("TIME", lambda event: to_local_time(event.at), "dim", firm=True),
    Column("EVENT", _format_event, firm=True),
    Column("WHERE", lambda event: event.board or event.host),
    Column("JOB", "job"),
    Column("REASON", "reason"),
)
USERS: tuple[Column[UserStats], ...] = (
    Column("USER", "user", "bold"),
    Column("PROJECT", "project"),
    Column("RUNNING", "running", number=True),
    Column("QUEUED", "queued", number=True),
    Column("BOARD TIME", lambda user: format_duration(user.board_s), number=True),
)
TOKENS: tuple[Column[FarmToken], ...] = (
    Column("NUMBER", "id", number=True),
    Column("USER", "user", "bold", firm=True),
    Column("ROLE", "role", firm=True),
    Column("STATE", _describe_token, firm=True),
    Column("RIGHTS", lambda token: " ".join(token.rights)),
    Column("GROUPS", lambda token: " ".join(token.groups)),
    Column("PROJECT", lambda token: f"({token.project})" if token.project else ""),
    Column("EXPIRES", lambda token: f"until {to_local_time(token.expires_at)}" if token.expires_at else "", firm=True),
    Column("NOTE", "note"),
)
RESERVATIONS: tuple[Column[FarmReservation], ...] = (
    Column("ID", "id", number=True),
    Column("BOARD", "board", "bold", firm=True),
    Column("USER", lambda one: f"{one.user}/{one.project}" if one.project else one.user, firm=True),
    Column("FROM", lambda one: to_local_time(one.begins_at), firm=True),
    Column("TO", lambda one: to_local_time(one.ends_at), firm=True),
)
WEBHOOKS: tuple[Column[WebhookStatus], ...] = (
    Column("NAME", "name", "bold", firm=True),
    Column("RECEIVER", "receiver"),
    Column("FORMAT", "format"),
    Column("EVENTS", lambda one: " ".join(one.events)),
    Column("SIGNED", lambda one: "yes" if one.is_signed else "no"),
    Column("WAITING", lambda one: str(one.waiting), number=True),
    Column("SENT", lambda one: str(one.sent), number=True),
    Column("FAILED", lambda one: str(one.failed), number=True),
    Column("ERROR", "error", "yellow"),
)
ACCESS: tuple[Column[BoardPermission], ...] = (
    Column("BOARD", "board", "bold", firm=True),
    Column("ALLOWED", lambda one: "yes" if one.allowed else "no", firm=True),
    Column("OPEN TO", lambda one: _format_access(one)),
    Column("USERS", lambda one: " ".join(one.users)),
)
AUDIT: tuple[Column[AuditEntry], ...] = (
    Column("TIME", lambda entry: to_local_time(entry.at), "dim", firm=True),
    Column("USER", lambda entry: entry.user or "?", firm=True),
    Column("ACTION AND SOURCE", _format_audit_entry),
)
