"""Jobs with several boards: allocation, end, loss and access."""

from __future__ import annotations

import pytest
from support.farm_desks import ADMIN, ANNA, BERT, BROKEN, Desk

from hil.controller.farm.leasing import leases
from hil.controller.farm.messages import BoardAccess, BoardRequest, JobResult, Kind, Principal, Right, Role
from hil.controller.farm.store import queries
from hil.errors import AccessRefused, NoSuchBoard, UsageError

CAROL = Principal("carol", Role.SUBMITTER, rights=frozenset({Right.COMMANDS}))
DAVE = Principal("dave", Role.SUBMITTER, rights=frozenset({Right.COMMANDS}))
LABELS = {"commands": True, "several_boards": True}
A, B, C = (BoardRequest(board=name) for name in "abc")


def submit(desk: Desk, first: str, *more: BoardRequest, who: Principal = CAROL, **order: object) -> str:
    [name] = desk.submit(who=who, kind=Kind.COMMAND, board=first, more=more, **order)
    return name


def used(desk: Desk) -> dict[str, str]:
    """Return the job of each leased board."""
    return {one.board: one.job for one in desk.grants()}


def test_job_gets_all_boards_in_order(desk: Desk) -> None:
    desk.online("a", "b", labels=LABELS)
    name = submit(desk, "b", A)
    assert used(desk) == {"a": name, "b": name}
    main, other = desk.grant("b"), desk.grant("a")
    assert [(one.card.name, one.grant.lease, bool(one.key)) for one in main.more] == [("a", other.lease, True)]
    assert (main.spec.kind, other.spec.kind, other.more) == (Kind.COMMAND, Kind.LEASE, ())
    [job] = desk.do(queries.jobs, submission=int(name))
    assert (job.board, job.boards, job.attempts) == ("b", ["b", "a"], 1)


def test_job_waits_while_one_board_is_busy(desk: Desk) -> None:
    desk.online("a", "b", labels=LABELS)
    [single] = desk.submit(who=BERT, board="b")
    pair = submit(desk, "a", B)
    assert used(desk) == {"b": single}
    [waiting] = desk.do(queries.ask, "queue", {}, desk.settings)
    assert waiting.why.startswith("needs 2 boards at once; ")
    desk.report(desk.grant("b"))
    assert used(desk) == {"a": pair, "b": pair}


def test_end_of_job_frees_all_boards(desk: Desk) -> None:
    desk.online("a", "b", labels=LABELS)
    first, second = submit(desk, "a", B), submit(desk, "b", A, who=DAVE)
    desk.report(desk.grant("a"))
    # The command may have changed its first board, so this board is checked before the next job.
    assert desk.jobs() == {first: "done", second: "queued"}
    desk.report(desk.grant("a"))
    assert used(desk) == {"a": second, "b": second}
    desk.cancel(second)
    assert [row for row in desk.rows("select * from hil.leases where ended_at is null and part > 0")] == []


def test_two_jobs_for_same_boards_do_not_block_each_other(desk: Desk) -> None:
    desk.online("a", "b", "c", labels=LABELS)
    names = [submit(desk, "a", B), submit(desk, "b", C, who=DAVE), submit(desk, "c", A, who=DAVE)]
    for _ in range(20):
        for grant in desk.grants():
            if grant.spec.kind is not Kind.LEASE:
                desk.report(grant)
        desk.tick()
    assert desk.jobs() == dict.fromkeys(names, "done")


@pytest.mark.parametrize("lost", ["host", "report"])
def test_loss_of_second_board_ends_job(desk: Desk, lost: str) -> None:
    desk.online("a", "b", labels=LABELS)
    name = submit(desk, "a", B, max_attempts=1)
    if lost == "host":
        desk.silence("b")
        desk.beat("a", [desk.grant("a").lease])
        desk.tick()
    else:
        desk.report(desk.grant("b"), BROKEN)
    result = desk.result(name)
    assert (result["exit_code"], result["outcome"]) == (4, "BOARD_LOST")
    assert result["result"]["reason"].startswith("board b: ")
    assert name not in used(desk).values()
    assert desk.board("b")["state"] == ("offline" if lost == "host" else "suspect")


@pytest.mark.parametrize(("kind", "ended"), [(Kind.COMMAND, (3, "TIMEOUT")), (Kind.LEASE, (0, ""))])
def test_time_limit_of_second_board_is_no_success(desk: Desk, kind: Kind, ended: tuple[int, str]) -> None:
    desk.online("a", "b", labels=LABELS)
    [name] = desk.submit(who=CAROL, kind=kind, board="a", more=(B,))
    # The host of the second board only waits: it reports the end of its time while the command still runs.
    assert (desk.grant("b").timeout_s > desk.grant("a").timeout_s) is (kind is Kind.COMMAND)
    desk.report(desk.grant("b"), JobResult(0, reason="time limit reached"))
    result = desk.result(name)
    assert (result["exit_code"], result["outcome"]) == ended
    assert name not in used(desk).values()


def test_loss_of_first_board_frees_second_board(desk: Desk) -> None:
    desk.online("a", "b", labels=LABELS)
    submit(desk, "a", B, max_attempts=1)
    desk.report(desk.grant("a"), BROKEN)
    assert "b" not in used(desk)
    assert desk.board("b")["state"] == "online"


def test_stop_of_host_counts_attempt_of_command(desk: Desk) -> None:
    desk.online("a", "b", labels=LABELS)
    name = submit(desk, "a", B, max_attempts=2)
    for attempt in (1, 2):
        assert desk.grant("a").attempt == attempt
        desk.leave("b")
        if attempt == 1:
            desk.report(desk.grant("a"))  # the check after the command
            desk.online("b", labels=LABELS)
    assert desk.result(name)["outcome"] == "BOARD_LOST"


def test_interrupted_attempt_is_listed_separately(desk: Desk) -> None:
    desk.online("a", "b")
    [name] = desk.submit(kind=Kind.LEASE, board="a", more=(B,))
    desk.leave("b")
    assert desk.jobs() == {name: "queued"}
    desk.online("b")
    job = desk.do(queries.job, name)
    assert (job.boards, job.attempts) == (["a", "b"], 1)
    assert [(one.board, one.part) for one in job.attempts_made] == [("a", 0), ("b", 1)] * 2
    assert [one.ended_at is None for one in job.attempts_made] == [False, False, True, True]


def test_retry_avoids_lost_board(desk: Desk) -> None:
    desk.online("a", "b", "c", labels=LABELS)
    name = submit(desk, "a", BoardRequest("name!=a"), max_attempts=2)
    lost = next(one.board for one in desk.grants() if one.board != "a")
    desk.report(desk.grant(lost), BROKEN)
    desk.report(desk.grant("a"))  # the check after the command
    assert set(used(desk)) >= {"a", {"b": "c", "c": "b"}[lost]}
    assert desk.jobs() == {name: "running"}


def test_timeout_of_job_ends_all_leases(desk: Desk) -> None:
    desk.online("a", "b", labels=LABELS)
    name = submit(desk, "a", B)
    desk.rows("update hil.leases set until = now() - interval '1 s' where ended_at is null")
    desk.tick()
    assert (desk.result(name)["outcome"], name in used(desk).values()) == ("TIMEOUT", False)


def test_long_wait_keeps_boards_free(desk: Desk) -> None:
    desk.online("a", "b", labels=LABELS)
    [busy] = desk.submit(who=BERT, board="b")
    pair = submit(desk, "a", B)
    desk.rows("update hil.jobs set queued_at = now() - interval '61 s' where submission = %s", int(pair))
    [single] = desk.submit(who=BERT, board="a")
    assert used(desk) == {"b": busy}
    desk.report(desk.grant("b"))
    assert used(desk) == {"a": pair, "b": pair}
    assert desk.jobs()[single] == "queued"


def test_long_wait_for_board_out_of_service_keeps_no_boards(desk: Desk) -> None:
    desk.online("a", "b", labels=LABELS)
    desk.drain("b")
    pair = submit(desk, "a", B)
    desk.rows("update hil.jobs set queued_at = now() - interval '61 s' where submission = %s", int(pair))
    [single] = desk.submit(who=BERT, board="a")
    assert used(desk) == {"a": single}


def test_lease_of_several_boards_starts_with_last_board(desk: Desk) -> None:
    desk.online("a", "b")
    [name] = desk.submit(kind=Kind.LEASE, board="a", more=(B,))
    main, other = desk.grant("a"), desk.grant("b")
    desk.started(main.lease)
    status = desk.do(leases.read_holding, main.lease)
    assert status is not None and not status.started
    desk.started(other.lease)
    status = desk.do(leases.read_holding, main.lease)
    assert status is not None and status.started
    desk.release(main.lease, status.key)
    assert (desk.jobs(), used(desk)) == ({name: "done"}, {})


@pytest.mark.parametrize(
    ("order", "error", "text"),
    [
        pytest.param({"board": "a", "more": (A,)}, UsageError, "requested twice", id="same board"),
        pytest.param({"board": "a", "more": (BoardRequest(board="x"),)}, NoSuchBoard, "board 'x' not found", id="name"),
        pytest.param({"more": (BoardRequest(),) * 2}, NoSuchBoard, "needs 3 different boards", id="too few"),
    ],
)
def test_submit_refuses_impossible_boards(desk: Desk, order: dict, error: type[Exception], text: str) -> None:
    desk.online("a", "b", labels=LABELS)
    with pytest.raises(error, match=text):
        desk.submit(who=CAROL, kind=Kind.COMMAND, **order)


def test_submit_refuses_several_boards_for_models(desk: Desk) -> None:
    desk.online("a", "b")
    with pytest.raises(UsageError, match="only commands and leases"):
        desk.submit(board="a", more=(B,))


def test_restricted_board_runs_jobs_of_its_users(desk: Desk) -> None:
    desk.online("a", access=BoardAccess(users=("bert",), groups=("vision",)))
    desk.online("b")
    desk.submit(2, who=ANNA)
    assert list(used(desk)) == ["b"]
    [bert] = desk.submit(who=BERT, board="a")
    assert used(desk)["a"] == bert
    desk.report(desk.grant("a"))
    member = Principal("erin", Role.SUBMITTER, groups=frozenset({"vision"}))
    [erin] = desk.submit(who=member, board="a")
    assert used(desk)["a"] == erin
    desk.report(desk.grant("a"))
    [root] = desk.submit(who=ADMIN, board="a")
    assert used(desk)["a"] == root


def test_submit_refuses_restricted_board(desk: Desk) -> None:
    desk.online("a", access=BoardAccess(groups=("vision",)))
    desk.online("b", labels=LABELS)
    with pytest.raises(AccessRefused, match="permission denied for anna: restricted boards: a") as refusal:
        desk.submit(who=ANNA, board="a")
    assert refusal.value.hint.startswith("open to group vision")
    with pytest.raises(AccessRefused, match="restricted boards: a"):
        submit(desk, "b", A)
    assert desk.jobs() == {}


def test_new_restriction_ends_waiting_jobs(desk: Desk) -> None:
    desk.online("a")
    [running, waiting] = desk.submit(who=BERT, count=1) + desk.submit(who=ANNA, board="a")
    desk.attend("a", held=[desk.grant("a").lease], access=BoardAccess(users=("bert",)))
    assert desk.jobs() == {running: "running", waiting: "done"}
    assert desk.result(waiting)["result"]["reason"].startswith("the user may no longer use a")
    assert ("board.access", "open to bert") in desk.events(board="a")


def test_older_host_of_first_board_is_refused(desk: Desk) -> None:
    desk.online("a", labels={"commands": True})
    desk.online("b", labels=LABELS)
    for first, board in (("a", "a"), ("", "a")):
        with pytest.raises(NoSuchBoard, match=f"the hosts of {board} cannot run a command with several boards"):
            submit(desk, first, B, selector="" if first else "name=a")
    # Such a host can serve the other boards.
    name = submit(desk, "b", A)
    assert used(desk) == {"a": name, "b": name}
