"""Tokens: good until they expire or are revoked, and kept as digests alone; and the audit."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from support.farm_rows import rows, with_tx

from hil.controller.farm.messages import Principal, Role
from hil.controller.farm.store.access import add_token, note_audit, principal_of, revoke
from hil.controller.farm.store.database import Tx
from hil.errors import UsageError

NOW = datetime.datetime.now(datetime.timezone.utc)
HOUR = datetime.timedelta(hours=1)


def test_a_token_stands_for_its_bearer(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        ann = await add_token(tx, "ann", Role.SUBMITTER, "vision", "her laptop")
        lab = await add_token(tx, "lab1", Role.HOST, expires_at=NOW + HOUR)
        assert ann.startswith("hilf_") and len(ann) == len("hilf_") + 43 and ann != lab
        assert await principal_of(tx, ann) == Principal("ann", Role.SUBMITTER, "vision", token=1)
        assert await principal_of(tx, lab) == Principal("lab1", Role.HOST, token=2)

    with_tx(farm_db, work)


@pytest.mark.parametrize("change", [str.upper, lambda token: token[:-1], lambda token: token + "x", lambda token: ""])
def test_what_is_no_token_stands_for_nobody(farm_db: str, change: Any) -> None:
    async def work(tx: Tx) -> None:
        token = await add_token(tx, "ann", Role.VIEWER)
        assert await principal_of(tx, change(token)) is None
        assert await principal_of(tx, "\ud800") is None

    with_tx(farm_db, work)


def test_the_token_itself_is_nowhere_in_the_database(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        token = await add_token(tx, "ann", Role.VIEWER)
        (row,) = await rows(tx, "select to_jsonb(t)::text as row from hil.tokens as t")
        assert token not in row["row"] and token.removeprefix("hilf_") not in row["row"]

    with_tx(farm_db, work)


def test_a_revoked_token_is_good_no_more_and_the_others_are(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        first, second = [await add_token(tx, "ann", Role.VIEWER) for _ in range(2)]
        for _ in range(2):
            assert await revoke(tx, 1) == "ann"
            assert await principal_of(tx, first) is None
            assert await principal_of(tx, second) is not None

    with_tx(farm_db, work)


def test_a_token_that_there_is_not_cannot_be_revoked(farm_db: str) -> None:
    with pytest.raises(UsageError, match="has no token 9"):
        with_tx(farm_db, lambda tx: revoke(tx, 9))


def test_a_token_expires(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        assert await principal_of(tx, await add_token(tx, "ann", Role.ADMIN, expires_at=NOW - HOUR)) is None
        assert await principal_of(tx, await add_token(tx, "ann", Role.ADMIN, expires_at=NOW + HOUR)) is not None

    with_tx(farm_db, work)


@pytest.mark.parametrize(
    ("user", "project", "said"),
    [
        ("", "", "no user can be called ''"),
        ("farm", "", "no user can be called 'farm'"),
        ("a\nb", "", "is no name"),
        (" ann", "", "is no name"),
        ("x" * 101, "", "is no name"),
        ("ann", "vision\t", "is no name"),
    ],
)
def test_names_that_nobody_has(farm_db: str, user: str, project: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        with_tx(farm_db, lambda tx: add_token(tx, user, Role.VIEWER, project))


def test_a_time_without_a_zone_is_refused(farm_db: str) -> None:
    with pytest.raises(UsageError, match="no time zone"):
        with_tx(farm_db, lambda tx: add_token(tx, "ann", Role.VIEWER, expires_at=NOW.replace(tzinfo=None)))


def test_what_was_done_is_noted(farm_db: str) -> None:
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
