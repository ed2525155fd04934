"""Whom a farm's tokens stand for, and how long that is taken for true."""

from __future__ import annotations

import pytest

from hil.controller.farm.messages import Role
from hil.controller.web.visitors import TRUST_S, Visitor, Visitors
from hil.errors import AccessRefused, FarmUnreachable

ANN = Visitor("ann", Role.SUBMITTER, "t")


class Asked:
    """A farm that knows one token, until it does not; and a clock."""

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


def test_the_farm_is_asked_once_a_minute() -> None:
    farm = Asked()
    for token, whom in (("t", ANN), ("x", None)):
        farm.count = 0
        assert [farm.visitors.find(token) for _ in range(3)] == [whom] * 3
        assert farm.count == 1 and farm.visitors.known(token) == (True, whom)
        farm.now += TRUST_S
        assert farm.visitors.known(token)[0] is False
        assert farm.visitors.find(token) == whom and farm.count == 2


def test_a_token_that_was_revoked_is_good_no_more() -> None:
    farm = Asked()
    assert farm.visitors.find("t") == ANN
    farm.error, farm.now = AccessRefused("revoked"), TRUST_S
    assert farm.visitors.find("t") is None


def test_while_the_farm_is_away_who_was_in_stays_in_and_nobody_comes_in() -> None:
    farm = Asked()
    assert farm.visitors.find("t") == ANN
    farm.error, farm.now = FarmUnreachable("away"), 10 * TRUST_S
    assert farm.visitors.find("t") == ANN
    assert farm.visitors.find("x") is None
    farm.error = None
    assert farm.visitors.find("x") is None and farm.visitors.find("t") == ANN


@pytest.mark.parametrize("token", ["", "x" * 201, "a\nb", "\u00e9", "a\x00"])
def test_what_can_be_no_token_is_not_asked_about(token: str) -> None:
    farm = Asked()
    assert farm.visitors.find(token) is None and farm.count == 0


def test_what_a_browser_keeps_is_not_the_token_and_is_this_servers_own() -> None:
    one, other = Asked().visitors, Asked().visitors
    kept = one.keep("t")
    assert "t" != kept == one.keep("t") and one.token_of(kept) == "t"
    assert other.token_of(kept) == "" and other.keep("t") != kept


@pytest.mark.parametrize(
    ("role", "own", "others", "holds"),
    [
        (Role.VIEWER, False, False, False),
        (Role.SUBMITTER, True, False, False),
        (Role.HOST, True, False, False),
        (Role.ADMIN, True, True, True),
    ],
)
def test_what_roles_may(role: Role, own: bool, others: bool, holds: bool) -> None:
    ann = Visitor("ann", role)
    assert (ann.may_cancel("ann"), ann.may_cancel("bob"), ann.may_hold) == (own, others, holds)
