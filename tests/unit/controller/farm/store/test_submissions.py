"""Test submissions: repeated, invalid and cancelled ones."""

from __future__ import annotations

from typing import Any

import pytest
from support.farm_desks import ADMIN, ANNA, BERT, Desk

from hil.controller.farm.leasing import submissions
from hil.controller.farm.messages import JobSpec, Kind, Principal, Priority, Role
from hil.errors import AccessRefused, FarmError, NoSuchBoard, UsageError


def deep(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


@pytest.fixture
def farm(desk: Desk) -> Desk:
    """Return a farm with two online boards."""
    desk.online("rpi5", labels={"chip": "a76", "mem": 8 * 2**30})
    desk.online("old-rpi", labels={"chip": "a53", "mem": 2**30})
    return desk


def test_submit_numbers_jobs_of_suite(farm: Desk) -> None:
    suite, one = farm.submit(3), farm.submit()
    number = suite[0].split(".")[0]
    assert suite == [f"{number}.1", f"{number}.2", f"{number}.3"]
    assert one == [str(int(number) + 1)]


def test_submit_ignores_repeated_key(farm: Desk) -> None:
    assert farm.submit(2, key="k") == farm.submit(2, key="k")
    assert len(farm.jobs()) == 2


def test_submit_rejects_key_of_other_user(farm: Desk) -> None:
    farm.submit(key="k")
    with pytest.raises(UsageError, match="a different user already used this submission key"):
        farm.submit(who=BERT, key="k")


def test_submit_rejects_unmatched_selector_with_nearest_boards(farm: Desk) -> None:
    with pytest.raises(NoSuchBoard, match="no board matches") as refused:
        farm.submit(selector="chip=a53, mem>=2GiB")
    assert refused.value.exit_code == 4
    assert "old-rpi: mem is" in refused.value.hint
    assert "rpi5: chip is a76" in refused.value.hint
    assert farm.jobs() == {}


def test_submit_queues_job_for_offline_board(farm: Desk) -> None:
    farm.leave("rpi5")
    [name] = farm.submit(selector="chip=a76")
    assert farm.jobs() == {name: "queued"}
    farm.attend("rpi5", labels={"chip": "a76"})
    assert farm.grant("rpi5").job == name


def test_submit_requires_known_and_matching_pinned_board(farm: Desk) -> None:
    with pytest.raises(NoSuchBoard, match="board 'rpi55' not found") as refused:
        farm.submit(board="rpi55")
    assert "did you mean 'rpi5'" in refused.value.hint
    with pytest.raises(NoSuchBoard, match="no board matches 'chip=a53'"):
        farm.submit(board="rpi5", selector="chip=a53")
    farm.submit(board="rpi5", selector="chip=a76")
    assert farm.grant("rpi5")


def test_submit_reports_farm_without_boards(desk: Desk) -> None:
    with pytest.raises(NoSuchBoard, match="no boards yet"):
        desk.submit()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("order", "why"),
    [
        ({"specs": ()}, "1 to 100000 jobs"),
        ({"timeout_s": 0}, "time limit"),
        ({"timeout_s": 10**400}, "time limit"),
        ({"project": "p" * 101, "who": ADMIN}, "project name exceeds 100"),
        ({"specs": (JobSpec(Kind.RUN, {"deep": deep(5000)}),)}, "exceeds the nesting limit"),
        ({"timeout_s": float("nan")}, "time limit"),
        ({"timeout_s": float("inf")}, "time limit"),
        ({"max_attempts": 0}, "max_attempts must be 1 to 100"),
        ({"selector": "chip=("}, "selector"),
        ({"key": ""}, "key"),
        ({"specs": (JobSpec(Kind.HEALTH),)}, "health jobs cannot be submitted"),
        ({"specs": (JobSpec(Kind.LEASE),) * 2}, "the only job of the submission"),
    ],
)
def test_submit_rejects_invalid_order(farm: Desk, order: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        farm.submit(**order)
    assert farm.jobs() == {}


def test_submit_replaces_unstorable_text(farm: Desk) -> None:
    [name] = farm.submit(title="a\0b", specs=(JobSpec(Kind.RUN, {"text": "\0 \ud800", "nan": float("nan")}),))
    [row] = farm.rows("select title from hil.submissions where id = %s", int(name))
    assert row["title"] == "a\ufffdb"
    assert farm.grants()[0].spec.options == {"text": "\ufffd ?", "nan": "nan"}


@pytest.mark.parametrize(
    ("who", "asked", "counted"),
    [
        (ANNA, "", "vision"),
        (ANNA, "vision", "vision"),
        (ANNA, "speech", None),
        (Principal("carl", Role.SUBMITTER), "speech", None),
        (ADMIN, "speech", "speech"),
    ],
)
def test_submit_restricts_project_to_token(farm: Desk, who: Principal, asked: str, counted: str | None) -> None:
    if counted is None:
        with pytest.raises(AccessRefused, match="not valid for project"):
            farm.submit(who=who, project=asked)
    else:
        farm.submit(who=who, project=asked)
        assert farm.rows("select project from hil.submissions where user_name <> 'farm'") == [{"project": counted}]


def test_cancel_ends_queued_job(farm: Desk) -> None:
    farm.submit(2)
    [name] = farm.submit()
    assert farm.cancel(name, ANNA) == [name]
    assert farm.jobs()[name] == "cancelled"
    assert (farm.result(name)["exit_code"], farm.result(name)["result"]["reason"]) == (130, "cancelled by anna")


def test_cancel_frees_board_of_running_job(farm: Desk) -> None:
    [name] = farm.submit(board="rpi5")
    [after] = farm.submit(board="rpi5")
    lease = farm.grant("rpi5").lease
    assert farm.cancel(name) == [name]
    assert farm.lease(lease)["reason"] == "cancelled by root"
    assert farm.beat("rpi5", [lease]).over == {lease: "cancelled by root"}
    assert farm.report(lease)[0] is False
    assert farm.jobs() == {name: "cancelled", after: "running"}
    assert farm.board("rpi5")["state"] == "online"


def test_cancel_ends_open_jobs_of_submission(farm: Desk) -> None:
    names = farm.submit(4)
    done = farm.grants()[0]
    farm.report(done)
    left = [name for name in names if name != done.job]
    assert farm.cancel(names[0].split(".")[0]) == left
    assert farm.cancel(names[0].split(".")[0]) == []
    assert farm.jobs() == {done.job: "done", **dict.fromkeys(left, "cancelled")}
    assert farm.grants() == []


@pytest.mark.ci
@pytest.mark.parametrize("name", ["99", "1.9", "99999999999999999999", "1.99999999999999999999", "x"])
def test_cancel_rejects_unknown_job(farm: Desk, name: str) -> None:
    with pytest.raises(UsageError, match=r"job .* not found|invalid job name"):
        farm.cancel(name)


def test_cancel_of_other_users_job_requires_admin(farm: Desk) -> None:
    [name] = farm.submit(who=ANNA)
    with pytest.raises(AccessRefused, match="belongs to anna"):
        farm.cancel(name, BERT)
    assert farm.jobs() == {name: "running"}
    assert farm.cancel(name, ADMIN) == [name]


def test_prioritise_moves_jobs_of_submission(farm: Desk) -> None:
    farm.submit(2)
    _, late = farm.submit(3), farm.submit(2)
    assert farm.do(submissions.set_priority, ANNA, late[0].split(".")[0], Priority.HIGH) == late
    for grant in farm.grants():
        farm.report(grant)
    assert {grant.job for grant in farm.grants()} == set(late)


def test_event_records_queued_job(farm: Desk) -> None:
    [name] = farm.submit(title="mobilenet")
    assert ("job.queued", "mobilenet") in farm.events(job=name)
    assert [what for what, _ in farm.events(job=name)] == ["job.queued", "job.granted"]


def test_submit_limits_waiting_orders_per_user(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions, "_MAX_WAITING", 3)
    desk.online("a")
    names = [*desk.submit(10), *desk.submit(), *desk.submit()]
    with pytest.raises(FarmError, match="anna already has 3 waiting submissions"):
        desk.submit()
    # Other users are not affected.
    desk.submit(who=BERT)
    desk.cancel(names[-1])
    desk.submit()
