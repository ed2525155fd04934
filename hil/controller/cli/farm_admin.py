"""`hil farm token`, `audit`, `gc`, `drain`, `resume` and `forget`: what admins of a farm do."""

from __future__ import annotations

import re

import click

from hil.controller.cli.commands import command, group
from hil.controller.cli.farm_options import connected
from hil.controller.cli.farm_tables import AUDIT, TOKENS, show, table
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, say
from hil.controller.farm.messages import Role
from hil.controller.farm.wording import UNITS


def _period(context: click.Context, option: click.Parameter, value: str) -> float:
    """How long: ``30d``, ``12h``, ``90m`` -> seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value)
    if not found:
        raise click.BadParameter(f"{value!r} is no time: 30d, 12h, 90m", context, option)
    return float(found[1]) * UNITS[found[2]]


@group(epilog="Example: hil farm token add anna --role submitter --project vision --expires 30d")
def token() -> None:
    """Make, list and revoke tokens: what users and hosts show to be let in."""


@token.command(epilog="Example: hil farm token add berlin-1 --role host --note 'the host in room 4'")
@click.argument("user")
@click.option(
    "--role",
    type=click.Choice([one.value for one in Role]),
    required=True,
    help="What it may do; each may all before it too.",
)
@click.option("--project", default="", metavar="P", help="Whom its jobs are counted for, beside the user.")
@click.option("--expires", callback=_period, default="0s", metavar="30d", help="When it ends (default: never).")
@click.option("--note", default="", metavar="TEXT", help="What it is for.")
@json_option
def add(user: str, role: str, project: str, expires: float, note: str, as_json: bool) -> None:
    """Make a token for USER. It is shown this once, and kept nowhere."""
    with connected() as farm:
        made = farm.do("token", user=user, role=role, project=project, expires_s=expires, note=note)
    answer(as_json, {"token": made["token"], "user": user, "role": role, "project": project}, made["token"])
    if not as_json:
        say("it is shown this once: give it to whoever it is for, as HIL_FARM_TOKEN")


@token.command("list", epilog="Example: hil farm token list --json")
@json_option
def list_tokens(as_json: bool) -> None:
    """List the tokens: whose they are and what they may do, not what they are."""
    with connected() as farm:
        rows = farm.ask("tokens")
    answer(as_json, {"tokens": rows}, show=lambda: show(table(TOKENS, rows)))


@token.command(epilog="Example: hil farm token revoke 7")
@click.argument("number", type=click.IntRange(1, 10**18))
@json_option
def revoke(number: int, as_json: bool) -> None:
    """End a token, by its NUMBER in the list: within seconds nobody is let in with it."""
    with connected() as farm:
        user = farm.do("revoke", id=number)["user"]
    answer(as_json, {"revoked": number, "user": user}, f"token {number} of {user} is good no more")


@command(epilog="Example: hil farm audit --limit 20")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="How many of the last.")
@json_option
def audit(limit: int, as_json: bool) -> None:
    """List who changed what, and what was refused, the newest last."""
    with connected() as farm:
        rows = farm.ask("audit", limit=limit)
    answer(as_json, {"audit": rows}, show=lambda: show(table(AUDIT, rows)))


@command(epilog="Example: hil farm gc --dry-run")
@click.option("--days", type=click.FloatRange(0, 3660), help="Keep what is younger (default: keep_days of the farm).")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def gc(days: float | None, dry_run: bool, as_json: bool) -> None:
    """Delete jobs that ended long ago with all that belongs to them, boards that no host has presented for as long, and
    files that nothing needs any more.
    """
    with connected() as farm:
        deleted = farm.do("gc", dry_run=dry_run, **({} if days is None else {"days": days}))
    counts = ", ".join(f"{count} {what}" for what, count in deleted["counts"].items() if count) or "nothing"
    text = f"{'would delete' if dry_run else 'deleted'} {counts}, {deleted['bytes']:,} bytes"
    answer(as_json, {"dry_run": dry_run, **deleted}, text)


@command(epilog="Example: hil farm drain rpi5-3 --reason 'new cable'")
@click.argument("board")
@click.option("--reason", default="", metavar="TEXT", help="Why, for the others.")
@json_option
def drain(board: str, reason: str, as_json: bool) -> None:
    """Let nothing new begin on BOARD; what runs there may end."""
    state = _state_after("drain", board, reason=reason)
    text = "drained" if state == "maintenance" else "draining: a job still runs on it"
    answer(as_json, {"board": board, "state": state}, f"{board} is {text}")


@command(epilog="Example: hil farm resume rpi5-3")
@click.argument("board")
@json_option
def resume(board: str, as_json: bool) -> None:
    """Give BOARD to jobs again; one that is in quarantine is checked first, at once."""
    state = _state_after("resume", board)
    answer(as_json, {"board": board, "state": state}, f"{board} is {state}")


@command(epilog="Example: hil farm forget rpi5-3")
@click.argument("board")
@json_option
def forget(board: str, as_json: bool) -> None:
    """Leave out BOARD, which no host presents any more; jobs that only it would have done end. Presented again, it is
    a new board.
    """
    with connected() as farm:
        ended = farm.do("forget", name=board)["ended"]
    waited = f"; job {', '.join(ended)} waited for it and ended" if ended else ""
    answer(as_json, {"board": board, "ended": ended}, f"{board} is forgotten{waited}")


def _state_after(action: str, board: str, **arguments: str) -> str:
    with connected() as farm:
        farm.do(action, name=board, **arguments)
        return next((row["state"] for row in farm.ask("boards") if row["name"] == board), "unknown")
