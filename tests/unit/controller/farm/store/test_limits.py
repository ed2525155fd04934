"""Test limits of users, on a real database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.farm_desks import ANNA, BERT, Desk

from hil.controller.farm.messages import LONGEST, BoardRequest, JobSpec, Kind
from hil.controller.farm.settings import FarmLimits, UserLimits
from hil.controller.farm.store import queries
from hil.errors import FarmError, UsageError


@pytest.fixture
def farm(desk: Desk) -> Desk:
    desk.settings = replace(
        desk.settings,
        limits=FarmLimits(UserLimits(boards=1, queued=2, lease_hours=2), {"bert": UserLimits(boards=2)}),
    )
    desk.online("a", "b", "c")
    return desk


def test_user_gets_no_more_boards_than_limit(farm: Desk) -> None:
    farm.submit(2)
    farm.submit(3, who=BERT)
    assert sorted(one.user for one in farm.grants()) == ["anna", "bert", "bert"]
    [mine] = [one for one in farm.grants() if one.user == "anna"]
    farm.report(mine)
    assert sorted(one.user for one in farm.grants()) == ["anna", "bert", "bert"]


def test_limit_leaves_boards_free_and_is_explained(farm: Desk) -> None:
    _, second = farm.submit(2)
    farm.tick()
    assert len(farm.grants()) == 1
    [waits] = farm.do(queries.queue, farm.settings)
    assert waits.name == second and waits.why.startswith("anna uses 1 board, the limit is 1; ")


def test_waiting_jobs_are_limited(farm: Desk) -> None:
    farm.submit()
    farm.submit(2)
    with pytest.raises(FarmError, match="limit of anna is 2 waiting jobs: 2 waiting, 1 new"):
        farm.submit()
    assert farm.submit(5, who=BERT)


def test_lease_of_more_boards_than_limit_is_usage_error(farm: Desk) -> None:
    with pytest.raises(UsageError, match="the limit of anna is 1 board at once, the job needs 2"):
        farm.submit(kind=Kind.LEASE, more=(BoardRequest(""),))


def test_long_leases_are_refused(farm: Desk) -> None:
    with pytest.raises(UsageError, match="lease of 3 h exceeds the limit of anna: 2 h"):
        farm.submit(kind=Kind.LEASE, timeout_s=3 * 3600.0)
    farm.submit(specs=(JobSpec(Kind.LEASE),), timeout_s=3 * 3600.0, who=BERT)
    # `hil run --board farm:` requests no time.
    farm.submit(specs=(JobSpec(Kind.LEASE, {LONGEST: True}),), timeout_s=86400.0)
    assert [one.timeout_s for one in farm.grants() if one.user == ANNA.user] == [7200.0]
    assert farm.submit(timeout_s=9 * 3600.0)  # a job, not a lease
