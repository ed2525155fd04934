"""Test the removal of boards from the farm."""

from __future__ import annotations

import pytest
from support.farm_desks import Desk

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing.sweeper import delete_old
from hil.controller.farm.messages import Kind
from hil.controller.farm.store.queries import boards, stats
from hil.errors import FarmError, UsageError

DAY = 86400.0


def absent(desk: Desk, name: str, days: float) -> None:
    """Mark a board as lost for some days, after a much longer time in the farm."""
    desk.leave(name)
    query = (
        "update hil.boards set owned_until = now() - make_interval(days => %s), added_at = now() - interval '1 year'"
    )
    desk.rows(f"{query} where name = %s", days, name)


def known(desk: Desk) -> list[str]:
    return [board.name for board in desk.do(boards)]


def test_forget_hides_board_from_selectors_and_lists(desk: Desk) -> None:
    desk.online("a", "b", labels={"chip": "a53"})
    desk.online("c", labels={"chip": "a72"})
    desk.leave("c")
    desk.forget("c")
    assert known(desk) == ["a", "b"]
    assert sum(desk.do(stats, desk.settings).boards.values()) == 2
    for order in ({"selector": "chip=a72"}, {"board": "c"}):
        with pytest.raises(FarmError, match=r"no board matches|not found"):
            desk.submit(**order)
    assert desk.events(board="c")[-1] == ("board.forgotten", "by root")
    with pytest.raises(UsageError, match="board 'c' not found"):
        desk.forget("c")


def test_forget_ends_only_jobs_without_remaining_board(desk: Desk) -> None:
    desk.online("a", labels={"chip": "a53"})
    desk.online("b", labels={"chip": "a72"})
    desk.leave("b")
    running, other = desk.submit(2, selector="chip=a53")
    pinned, selected = *desk.submit(board="b"), *desk.submit(selector="chip=a72")
    [either] = desk.submit(selector="chip in (a53, a72)")
    assert sorted(desk.forget("b")) == sorted([pinned, selected])
    open_ = {running: "running", other: "queued", either: "queued"}
    assert desk.jobs() == {**open_, pinned: "done", selected: "done"}
    query = "select exit_code, outcome, result ->> 'reason' as why from hil.results join hil.jobs on id = job"
    [result] = desk.rows(f"{query} where submission = %s", int(pinned))
    assert (result["exit_code"], result["outcome"]) == (4, "BOARD_LOST") and "after the removal of b" in result["why"]


def test_forget_rejects_attended_board(desk: Desk) -> None:
    desk.online("a")
    with pytest.raises(UsageError, match="still served by h"):
        desk.forget("a")
    assert desk.forget_absent(0) == []
    assert known(desk) == ["a"]


def test_forgotten_board_returns_as_new_with_higher_fence(desk: Desk) -> None:
    desk.online("a")
    desk.drain("a")
    fence = desk.board("a")["fence"]
    desk.leave("a")
    desk.forget("a")
    desk.attend("a", "another worker", host="south")
    assert (desk.board("a")["hold"], desk.board("a")["state"]) == ("", "suspect")
    check = desk.grant("a")
    assert check.spec.kind is Kind.HEALTH and check.fence > fence
    assert known(desk) == ["a"]


@pytest.mark.ci
def test_forget_absent_removes_old_boards_except_held(desk: Desk) -> None:
    desk.online("long", "lately", "held", "here")
    desk.drain("held")
    for name, days in (("long", 31), ("held", 31), ("lately", 29)):
        absent(desk, name, days)
    assert desk.forget_absent(30 * DAY) == ["long"]
    assert known(desk) == ["held", "here", "lately"]
    assert desk.forget_absent(30 * DAY) == []


def test_forget_absent_counts_from_loss_of_board(desk: Desk) -> None:
    desk.online("a")
    desk.rows("update hil.boards set added_at = now() - interval '1 year'")
    desk.leave("a")
    assert desk.forget_absent(DAY) == []


def test_gc_deletes_forgotten_board_after_last_lease(desk: Desk) -> None:
    async def clean(tx: Tx) -> int:
        async def delete(digests: list[str]) -> None:
            raise AssertionError("there are no files")

        return (await delete_old(tx, 30 * DAY, delete)).counts["boards"]

    desk.online("a")
    desk.leave("a")
    desk.forget("a")
    assert desk.do(clean) == 0
    desk.rows("update hil.submissions set at = now() - interval '40 days'")
    desk.rows("update hil.jobs set finished_at = now() - interval '40 days'")
    assert desk.do(clean) == 1
    assert desk.rows("select from hil.boards") == []
