"""`hil farm token`, `audit`, `gc` and `forget`: commands for farm administrators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.commands import group, make_command
from hil.controller.cli.farm.options import connect_farm
from hil.controller.cli.farm.tables import ACCESS, AUDIT, TOKENS, make_table, show
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.times import read_duration
from hil.controller.farm.messages import Right, Role
from hil.controller.records.commands.farm import (
    AuditList,
    BoardAccessList,
    BoardRemoval,
    CreatedToken,
    FarmCleanup,
    TokenList,
    TokenRevocation,
)
from hil.controller.records.lab.farm import (
    AuditEntry,
    BoardPermission,
    CleanedFarm,
    FarmToken,
    FarmUser,
    ForgottenBoard,
    NewToken,
    RevokedToken,
)
from hil.errors import VersionMismatch

if TYPE_CHECKING:
    from hil.controller.farm.client.client import FarmClient


def _parse_period(context: click.Context, option: click.Parameter, value: str) -> float:
    """Convert a duration such as ``30d``, ``12h``, ``90m`` to seconds; 0 is unlimited."""
    seconds = read_duration(value)
    if seconds is None:
        raise click.BadParameter(f"invalid duration {value!r}: expected for example 30d, 12h, 90m", context, option)
    return seconds


@group(epilog="Example: hil farm token add anna --role submitter --project vision --expires 30d")
def token() -> None:
    """Create, list and revoke the access tokens of users and hosts."""


@token.command(epilog="Example: hil farm token add berlin-1 --role host --note 'the host in room 4'")
@click.argument("user")
@click.option(
    "--role",
    type=click.Choice([one.value for one in Role]),
    required=True,
    help="Role; each role includes the previous roles.",
)
@click.option(
    "--project",
    default="",
    metavar="P",
    help="Project of this token's jobs: board time counts for the project and the user.",
)
@click.option(
    "--right",
    "rights",
    multiple=True,
    type=click.Choice([one.value for one in Right]),
    help="Also allow: power of boards, images, or any command on hosts with --allow-commands. Repeatable.",
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="G",
    help="Group of the user: allows boards whose config lists the group. Repeatable.",
)
@click.option("--expires", callback=_parse_period, default="0s", metavar="30d", help="Lifetime (default: unlimited).")
@click.option("--note", default="", metavar="TEXT", help="Purpose of the token.")
@json_option
def add(
    user: str,
    role: str,
    project: str,
    rights: tuple[str, ...],
    groups: tuple[str, ...],
    expires: float,
    note: str,
    as_json: bool,
) -> None:
    """Create a token for USER. The token is shown only once and not stored."""
    with connect_farm() as farm:
        _check_rights(farm, rights)
        given: dict[str, Any] = {"user": user, "role": role, "project": project, "rights": rights, "note": note}
        given |= {"groups": groups} if groups else {}
        made: NewToken = farm.do("token", expires_s=expires, **given)
    document = CreatedToken(
        token=made.token, user=user, role=role, project=project, rights=list(rights), groups=list(groups)
    )
    answer(as_json, document, made.token)
    if not as_json:
        print_message("shown only once: give the token to the user, who sets HIL_FARM_TOKEN to this value")


def _check_rights(farm: FarmClient, rights: Sequence[str]) -> None:
    """Raise VersionMismatch if the gateway is older and would ignore rights of a new token.

    An administrator has all rights that the gateway knows.
    """
    caller: FarmUser | None = farm.ask("me") if rights else None
    if caller is not None and caller.role == Role.ADMIN.value:
        known: set[str] = set(caller.rights)
        if unknown := [right for right in rights if right not in known]:
            raise VersionMismatch(
                f"the gateway does not support the right {', '.join(unknown)}, and would ignore it",
                hint="update the gateway, or create the token without --right",
            )


@token.command("list", epilog="Example: hil farm token list --json")
@json_option
def list_tokens(as_json: bool) -> None:
    """List the users, roles and dates of all tokens, without the tokens themselves."""
    with connect_farm() as farm:
        rows: list[FarmToken] = farm.ask("tokens")
    answer(as_json, TokenList(tokens=rows), show=lambda: show(make_table(TOKENS, rows)))


@token.command(epilog="Example: hil farm token revoke 7")
@click.argument("number", type=click.IntRange(1, 10**18))
@json_option
def revoke(number: int, as_json: bool) -> None:
    """Revoke a token by its NUMBER in the list. It becomes invalid within seconds."""
    with connect_farm() as farm:
        token: RevokedToken = farm.do("revoke", id=number)
    answer(as_json, TokenRevocation(revoked=number, user=token.user), f"token {number} of {token.user} revoked")


@make_command(epilog="Example: hil farm access --user anna")
@click.option("--user", default="", metavar="NAME", help="Show the boards of this user (admins only).")
@json_option
def access(user: str, as_json: bool) -> None:
    """Show which boards you, or a user, may use. For admins: also all users who may use each board.

    The table [access] of a board's config limits the board to users and groups (docs/farm-access.md).
    """
    with connect_farm() as farm:
        rows: list[BoardPermission] = farm.ask("access", user=user)
    answer(as_json, BoardAccessList(boards=rows), show=lambda: show(make_table(ACCESS, rows)))


@make_command(epilog="Example: hil farm audit --limit 20")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Number of newest entries to show."
)
@json_option
def audit(limit: int, as_json: bool) -> None:
    """List changes by user, and refused requests, newest last."""
    with connect_farm() as farm:
        rows: list[AuditEntry] = farm.ask("audit", limit=limit)
    answer(as_json, AuditList(audit=rows), show=lambda: show(make_table(AUDIT, rows)))


@make_command(epilog="Example: hil farm gc --dry-run")
@click.option(
    "--days",
    type=click.FloatRange(0, 3660),
    help="Keep results that are newer than this many days (default: keep_days of the farm).",
)
@click.option("--dry-run", is_flag=True, help="Show the planned deletions without deleting.")
@json_option
def gc(days: float | None, dry_run: bool, as_json: bool) -> None:
    """Delete old jobs with their data, boards that no host has served for the same time, and unused files."""
    with connect_farm() as farm:
        deleted: CleanedFarm = farm.do("gc", dry_run=dry_run, **({} if days is None else {"days": days}))
    counts = ", ".join(f"{count} {what}" for what, count in deleted.counts.items() if count) or "nothing"
    text = f"{'would delete' if dry_run else 'deleted'} {counts}, {deleted.bytes:,} bytes"
    answer(as_json, FarmCleanup(dry_run=dry_run, counts=deleted.counts, bytes=deleted.bytes), text)


@make_command(epilog="Example: hil farm forget rpi5-3")
@click.argument("board")
@json_option
def forget(board: str, as_json: bool) -> None:
    """Remove BOARD after all hosts stopped serving it. Jobs that require BOARD end.

    If a host serves BOARD again, the farm treats it as a new board.
    """
    with connect_farm() as farm:
        jobs: ForgottenBoard = farm.do("forget", name=board)
    waited = f"; waiting jobs ended: {', '.join(jobs.ended)}" if jobs.ended else ""
    answer(as_json, BoardRemoval(board=board, ended=jobs.ended), f"{board} removed{waited}")
