"""Test tokens, which are stored as digests until they expire or are revoked, and the audit log."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from support.farm_rows import rows, with_tx

from hil.controller.farm.database.database import Tx
from hil.controller.farm.messages import Principal, Role
from hil.controller.farm.store.access import add_token, find_principal, note_audit, revoke
from hil.errors import UsageError

NOW = datetime.datetime.now(datetime.timezone.utc)
HOUR = datetime.timedelta(hours=1)


@pytest.mark.ci
def test_token_identifies_user_role_and_project(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        ann = await add_token(tx, "ann", Role.SUBMITTER, "vision", "her laptop")
        lab = await add_token(tx, "lab1", Role.HOST, expires_at=NOW + HOUR)
        assert ann.startswith("hilf_") and len(ann) == len("hilf_") + 43 and ann != lab
        assert await find_principal(tx, ann) == Principal("ann", Role.SUBMITTER, "vision", token=1)
        assert await find_principal(tx, lab) == Principal("lab1", Role.HOST, token=2)

    with_tx(farm_db, work)


@pytest.mark.parametrize("change", [str.upper, lambda token: token[:-1], lambda token: token + "x", lambda token: ""])
def test_token_lookup_rejects_invalid_token(farm_db: str, change: Any) -> None:
    async def work(tx: Tx) -> None:
        token = await add_token(tx, "ann", Role.VIEWER)
        assert await find_principal(tx, change(token)) is None
        assert await find_principal(tx, "\ud800") is None

    with_tx(farm_db, work)


def test_database_stores_only_token_digest(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        token = await add_token(tx, "ann", Role.VIEWER)
        (row,) = await rows(tx, "select to_jsonb(t)::text as row from hil.tokens as t")
        assert token not in row["row"] and token.removeprefix("hilf_") not in row["row"]

    with_tx(farm_db, work)


def test_revoke_invalidates_only_given_token(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        first, second = [await add_token(tx, "ann", Role.VIEWER) for _ in range(2)]
        for _ in range(2):
            assert await revoke(tx, 1) == "ann"
            assert await find_principal(tx, first) is None
            assert await find_principal(tx, second) is not None

    with_tx(farm_db, work)


def test_revoke_rejects_unknown_token(farm_db: str) -> None:
    with pytest.raises(UsageError, match="token 9 not found"):
        with_tx(farm_db, lambda tx: revoke(tx, 9))


def test_token_expires(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        assert await find_principal(tx, await add_token(tx, "ann", Role.ADMIN, expires_at=NOW - HOUR)) is None
        assert await find_principal(tx, await add_token(tx, "ann", Role.ADMIN, expires_at=NOW + HOUR)) is not None

    with_tx(farm_db, work)


@pytest.mark.parametrize(
    ("user", "project", "said"),
    [
        ("", "", "invalid user name ''"),
        ("farm", "", "invalid user name 'farm'"),
        ("a\nb", "", "invalid name"),
        (" ann", "", "invalid name"),
        ("x" * 101, "", "invalid name"),
        ("ann", "vision\t", "invalid name"),
    ],
)
def test_add_token_rejects_invalid_names(farm_db: str, user: str, project: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        with_tx(farm_db, lambda tx: add_token(tx, user, Role.VIEWER, project))


def test_add_token_rejects_expiry_without_time_zone(farm_db: str) -> None:
    with pytest.raises(UsageError, match="missing time zone"):
        with_tx(farm_db, lambda tx: add_token(tx, "ann", Role.VIEWER, expires_at=NOW.replace(tzinfo=None)))


def test_audit_records_actions(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        who = Principal("ann", Role.SUBMITTER, peer="ipv4:10.0.0.1:5")
        await note_audit(tx, who, "drain", "pi", False, {"needed": "admin"})
        await note_audit(tx, who, "drain", "a\0\ud800", False, {"of": "a\0\ud800"})
        row, odd = await rows(tx, "select * from hil.audit order by id")
        assert odd["object"] == odd["detail"]["of"] == "a\ufffd?"
        assert (row["user_name"], row["role"], row["peer"]) == ("ann", "submitter", "ipv4:10.0.0.1:5")
        assert (row["action"], row["object"], row["allowed"]) == ("drain", "pi", False)
        assert row["detail"] == {"needed": "admin"}

    with_tx(farm_db, work)
