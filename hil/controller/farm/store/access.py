"""Tokens and audit. Only digests of tokens are stored."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from hil.controller.farm.database.database import Tx
from hil.controller.farm.messages import FARM_USER, Principal, Right, Role
from hil.controller.farm.store.records import as_json, fetch_rows, make_storable
from hil.errors import UsageError

PREFIX = "hilf_"
_BYTES = 32
_MAX_NAME_LENGTH = 100
_MAX_GROUPS = 200
_GROUP = re.compile(r"[\w.:/@+-]{1,100}")


async def add_token(
    tx: Tx,
    user: str,
    role: Role,
    project: str = "",
    note: str = "",
    expires_at: datetime | None = None,
    rights: Iterable[Right] = (),
    groups: Iterable[str] = (),
) -> str:
    """Create and return a token. Only the digest is stored. Raises UsageError for an invalid name or expiry time."""
    granted = sorted({right.value for right in rights})
    if granted and not role.covers(Role.SUBMITTER):
        raise UsageError(
            f"role {role.value} cannot have the right {granted[0]}", hint="use the role submitter, host or admin"
        )
    groups = check_groups(groups)
    for name in (user, project):
        if len(name) > _MAX_NAME_LENGTH or not name.isprintable() or name != name.strip():
            raise UsageError(f"invalid name {name!r}", hint=f"use at most {_MAX_NAME_LENGTH} printable characters")
    if user in ("", FARM_USER):
        raise UsageError(f"invalid user name {user!r}", hint="hil farm token add USER")
    if expires_at is not None and expires_at.tzinfo is None:
        raise UsageError(f"missing time zone in {expires_at}")
    token = PREFIX + secrets.token_urlsafe(_BYTES)
    await tx.execute(
        "insert into hil.tokens (digest, user_name, project, role, note, expires_at, rights, groups)"
        " values (%s, %s, %s, %s, %s, %s, %s, %s)",
        [_hash_token(token), user, project, Role(role).value, make_storable(note), expires_at, granted, groups],
    )
    return token


def check_groups(groups: Iterable[str]) -> list[str]:
    """Return names of groups, sorted and without duplicates. Raises UsageError for an invalid name."""
    found = sorted(set(groups))
    if bad := next((name for name in found if not _GROUP.fullmatch(name)), None):
        raise UsageError(f"invalid group {bad[:50]!r}", hint="use at most 100 letters, digits and . _ - : / @ +")
    if len(found) > _MAX_GROUPS:
        raise UsageError(f"at most {_MAX_GROUPS} groups are allowed, got {len(found)}")
    return found


async def revoke(tx: Tx, number: int) -> str:
    """Revoke a token and return the user name. Idempotent. Raises UsageError if the token does not exist."""
    query = "update hil.tokens set revoked_at = coalesce(revoked_at, now()) where id = %s returning user_name"
    rows = await fetch_rows(tx, query, [number])
    if not rows:
        raise UsageError(f"token {number} not found", hint="hil farm token list")
    return str(rows[0]["user_name"])


async def find_principal(tx: Tx, token: str) -> Principal | None:
    """Return the principal of a token, or None if it is unknown, expired or revoked."""
    query = (
        "select id as token, user_name as user, project, role, rights, groups from hil.tokens"
        " where digest = %s and revoked_at is null"
        " and (expires_at is null or expires_at > now())"
    )
    rows = await fetch_rows(tx, query, [_hash_token(token)])
    if not rows:
        return None
    rights = frozenset(right for right in Right if right.value in rows[0]["rights"])
    groups = frozenset(rows[0]["groups"])
    return Principal(**{**rows[0], "role": Role(rows[0]["role"]), "rights": rights, "groups": groups})


async def note_audit(
    tx: Tx, who: Principal, action: str, object: str = "", allowed: bool = True, detail: Mapping[str, Any] | None = None
) -> None:
    """Record an action or a refusal in the audit."""
    await tx.execute(
        "insert into hil.audit (user_name, role, peer, action, object, allowed, detail)"
        " values (%s, %s, %s, %s, %s, %s, %s)",
        [
            who.user,
            who.role.value,
            who.peer,
            make_storable(action),
            make_storable(object),
            allowed,
            as_json(dict(detail or {})),
        ],
    )


def _hash_token(token: str) -> str:
    # A plain digest is safe, because tokens are long and random.
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
