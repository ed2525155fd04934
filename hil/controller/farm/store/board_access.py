"""Who may use which boards."""

from __future__ import annotations

from collections import defaultdict

from hil.controller.farm.database.database import Tx
from hil.controller.farm.messages import ALL_BOARDS, BoardAccess, Principal, Role
from hil.controller.farm.store.records import fetch_rows, read_access
from hil.controller.records.lab.farm import BoardPermission, BoardUsers
from hil.errors import AccessRefused, UsageError

_TOKENS = """
    select user_name, role, groups from hil.tokens
    where revoked_at is null and (expires_at is null or expires_at > now()) and role <> 'viewer'
"""
_BOARDS = "select name, coalesce(card -> 'access', '{}') as access from hil.boards where not forgotten order by name"


def check_board_access(who: Principal, board: str, access: BoardAccess) -> None:
    """Raise AccessRefused if a user may not use a board."""
    if not access.allows(who.user, who.board_groups):
        raise AccessRefused(
            f"permission denied for {who.user}: {board} is restricted",
            hint="hil farm access shows which boards you may use",
        )


async def list_permissions(tx: Tx, who: Principal | None, user: str = "") -> list[BoardPermission]:
    """Return who may use each board.

    Args:
        user: user for the field ``allowed``; "" for the caller.

    Raises:
        AccessRefused: only admins may ask about other users.
        UsageError: the user has no valid token.
    """
    assert who is not None
    is_admin = who.role is Role.ADMIN
    if user not in ("", who.user) and not is_admin:
        raise AccessRefused(f"permission denied for {who.user}: only admins can see the access of {user}")
    groups: dict[str, set[str]] = defaultdict(set)
    for row in await fetch_rows(tx, _TOKENS):
        groups[row["user_name"]].update(row["groups"], [ALL_BOARDS] if row["role"] == Role.ADMIN.value else [])
    if user in ("", who.user):
        user, groups[who.user] = who.user, {*who.board_groups}
    elif user not in groups:
        raise UsageError(f"user {user!r} has no valid token", hint="hil farm token list")
    found = []
    for row in await fetch_rows(tx, _BOARDS):
        access = read_access(row["access"])
        users = sorted(one for one, mine in groups.items() if access.allows(one, mine)) if is_admin else []
        allowed = access.allows(user, groups[user])
        listed = BoardUsers(users=list(access.users), groups=list(access.groups))
        found.append(BoardPermission(board=row["name"], access=listed, allowed=allowed, users=users))
    return found
