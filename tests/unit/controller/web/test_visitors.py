"""Test the users behind farm tokens and the lifetime of cached answers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hil.controller.farm.messages import Role
from hil.controller.web.access import visitors
from hil.controller.web.access.visitors import TRUST_SECONDS, Visitor, VisitorLookup, Visitors
from hil.errors import AccessRefused, FarmUnreachable

ANN = Visitor("ann", Role.SUBMITTER, "t")


class Asked:
    """Farm that knows one token, with a clock."""

    def __init__(self) -> None:
        self.count, self.now = 0, 0.0
        self.error: Exception | None = None
        self.visitors = Visitors(self.ask, lambda: self.now)

    def ask(self, token: str) -> Visitor:
        self.count += 1
        if self.error:
            raise self.error
        if token != "t":
            raise AccessRefused("not good")
        return ANN


def test_visitors_cache_lookup_for_trust_period() -> None:
    farm = Asked()
    for token, whom in (("t", ANN), ("x", None)):
        farm.count = 0
        assert [farm.visitors.find(token) for _ in range(3)] == [whom] * 3
        assert farm.count == 1 and farm.visitors.get_cached(token) == (True, whom)
        farm.now += TRUST_SECONDS
        assert farm.visitors.get_cached(token)[0] is False
        assert farm.visitors.find(token) == whom and farm.count == 2


def test_visitors_reject_revoked_token_after_trust_period() -> None:
    farm = Asked()
    assert farm.visitors.find("t") == ANN
    farm.error, farm.now = AccessRefused("revoked"), TRUST_SECONDS
    assert farm.visitors.find("t") is None


def test_visitors_keep_known_users_during_farm_outage() -> None:
    farm = Asked()
    assert farm.visitors.find("t") == ANN
    farm.error, farm.now = FarmUnreachable("away"), 10 * TRUST_SECONDS
    assert farm.visitors.find("t") == ANN
    assert farm.visitors.find("x") is None
    farm.error = None
    assert farm.visitors.find("x") is None and farm.visitors.find("t") == ANN


def test_refused_tokens_displace_no_valid_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "_MOST_KNOWN", 3)
    farm = Asked()
    for token in ("t", "1", "2", "3", "4", "5"):
        farm.visitors.find(token)
    assert farm.visitors.get_cached("t") == (True, ANN)


def test_visitor_lookup_limits_unknown_tokens_of_client() -> None:
    farm, answered, threads = Asked(), threading.Event(), set()

    def ask(token: str) -> Visitor:
        if token != "t":
            threads.add(threading.current_thread())
            assert answered.wait(60)
        return farm.ask(token)

    async def run() -> None:
        found = Visitors(ask, lambda: farm.now)
        lookup = VisitorLookup(found)
        found.find("t")
        farm.now = TRUST_SECONDS
        waiting = [asyncio.create_task(lookup.find(str(token), "anna")) for token in (1, 2, 3, 4, 4)]
        await asyncio.sleep(0.1)
        try:
            with pytest.raises(AccessRefused):
                await lookup.find("5", "anna")
            waiting.append(asyncio.create_task(lookup.find("5", "ben")))
            # A user who was valid before does not wait for unknown tokens.
            assert await asyncio.wait_for(lookup.find("t", "anna"), 30) == ANN
        finally:
            answered.set()
        assert await asyncio.gather(*waiting) == [None] * 6
        assert await lookup.find("6", "anna") is None

    asyncio.run(run())
    assert len(threads) <= 2


@pytest.mark.parametrize("token", ["", "x" * 201, "a\nb", "\u00e9", "a\x00"])
def test_visitors_reject_malformed_token_without_call(token: str) -> None:
    farm = Asked()
    assert farm.visitors.find(token) is None and farm.count == 0


def test_visitors_cookie_hides_token_and_binds_user_and_server() -> None:
    one, other = Asked().visitors, Asked().visitors
    kept = one.keep("t", "1000")
    assert "t" != kept == one.keep("t", "1000") and one.find_token(kept, "1000") == "t"
    assert one.find_token(kept, "65534") == "" and one.keep("t", "65534") != kept
    assert other.find_token(kept, "1000") == "" and other.keep("t", "1000") != kept


@pytest.mark.parametrize(
    ("role", "own", "others", "holds"),
    [
        (Role.VIEWER, False, False, False),
        (Role.SUBMITTER, True, False, False),
        (Role.HOST, True, False, False),
        (Role.ADMIN, True, True, True),
    ],
)
def test_visitor_permissions_follow_role(role: Role, own: bool, others: bool, holds: bool) -> None:
    ann = Visitor("ann", role)
    assert (ann.may_cancel("ann"), ann.may_cancel("bob"), ann.may_hold) == (own, others, holds)
