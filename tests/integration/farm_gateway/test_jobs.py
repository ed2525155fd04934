"""Jobs at a gateway, from submission to result."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
from support.gateways import WAIT_S, BareBoard, rows, simple_order
from support.waiting import eventually

from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.client.lease_session import LeaseSession, lease_order
from hil.controller.farm.gateway import attached_workers
from hil.controller.farm.messages import JobResult, JobSpec, Kind, Role
from hil.errors import BoardBusy, FarmError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

pytestmark = pytest.mark.daily

Client = Callable[..., FarmClient]


def state_of(farm: FarmClient, job: str) -> str:
    return str(farm.ask("job", name=job).state)


def printed(farm: FarmClient, name: str) -> str:
    return "".join(piece.text for piece in farm.ask("logs", name=name))


def test_first_result_of_job_counts(client: Client, board: BareBoard) -> None:
    farm = client()
    _, [job] = farm.submit(simple_order(selector="chip=a53"))
    grant = board.send_grant()
    assert (grant.job, grant.board, grant.user, grant.attempt) == (job, "rpi", "anna", 1)
    assert state_of(farm, job) == "running"
    board.start(grant)
    first = JobResult(1, "FAIL", "they differ", record={"mismatches": 3}, board_ns=(1, 2))
    assert board.report(grant, first).recorded
    assert board.report(grant, first).recorded  # a repeated report: the reply to the first was lost
    late = board.report(grant, JobResult(0, "PASS"))
    assert not late.recorded and "result already recorded" in late.reason
    [told] = farm.ask("result", name=job)
    assert (told.name, told.exit_code, told.outcome, told.record) == (job, 1, "FAIL", {"mismatches": 3})


def test_gateway_queues_repeated_submission_once(client: Client, board: BareBoard) -> None:
    farm, order = client(), simple_order(key="the-very-same")
    assert farm.submit(order) == farm.submit(order)
    board.send_grant()
    assert board.grants.empty()


def test_unsatisfiable_submission_suggests_nearest_boards(client: Client, board: BareBoard) -> None:
    with pytest.raises(FarmError) as refused:
        client().submit(simple_order(selector="chip=a76"))
    assert "rpi" in refused.value.hint and refused.value.exit_code == 4


def test_jobs_run_in_turn_on_single_board(client: Client, board: BareBoard) -> None:
    farm = client()
    _, jobs = farm.submit(simple_order(specs=(JobSpec(Kind.RUN),) * 3))
    seen = []
    for _ in jobs:
        grant = board.send_grant()
        assert board.grants.empty()
        seen.append(grant.job)
        board.report(grant)
    assert sorted(seen) == sorted(jobs)


def test_cancelling_job_ends_lease(client: Client, board: BareBoard) -> None:
    farm = client()
    _, [job] = farm.submit(simple_order())
    grant = board.send_grant()
    assert farm.do("cancel", name=job).cancelled == [job]
    ended, *_ = eventually(lambda: [one for one in board.told("ended") if one.lease == grant.lease])
    assert "anna" in ended.reason
    assert farm.ask("result", name=job)[0].exit_code == 130


def test_follow_streams_states_and_logs_to_end(client: Client, board: BareBoard) -> None:
    farm = client()
    submission, jobs = farm.submit(simple_order(specs=(JobSpec(Kind.RUN),) * 2))
    told: queue.Queue[pb.FollowReply | None] = queue.Queue()

    def follow() -> None:
        for reply in farm.follow([str(submission)], logs=True):
            told.put(reply)
        told.put(None)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    for _ in jobs:
        grant = board.send_grant()
        board.start(grant)
        for line in range(20):
            board.print(grant, f"{grant.job} line {line}\n")
        # The report uses a different path than the log lines, and may arrive first.
        eventually(lambda job=grant.job: printed(farm, job).count("line") == 20)
        board.report(grant)
    replies = list(iter(lambda: told.get(timeout=WAIT_S), None))
    follower.join()
    for job in jobs:
        text = "".join(one.log.text for one in replies if one.log.job == job)
        assert text == "".join(f"{job} line {line}\n" for line in range(20))
        states = [one.job.state for one in replies if one.job.name == job]
        assert states[-1] == "done" and states == sorted(states, key=["queued", "running", "done"].index)
    assert printed(farm, str(submission)).count("line") == 40
    late = list(farm.follow([str(submission)], logs=True))
    assert sum(one.log.text.count("line") for one in late) == 40
    after = max(one.log.number for one in late)
    request = pb.FollowRequest(jobs=[str(submission)], logs=True, after=after)
    again = list(farm.stub.Follow(request, metadata=farm.metadata))
    assert not [one for one in again if one.log.text] and len(again) == 2


def test_follow_and_lease_show_drain_reason(client: Client, board: BareBoard) -> None:
    admin, farm = client("ann", Role.ADMIN), client()
    admin.do("drain", name=board.name, reason="new cable")
    _, [job] = farm.submit(simple_order())
    followed = farm.follow([job])
    assert next(iter(followed)).job.blocked == f"{board.name} is drained by ann: new cable"
    with LeaseSession(farm.address, lease_order("", "a test")) as waiting:
        with pytest.raises(BoardBusy, match="is drained by ann: new cable"):
            waiting.wait_with_progress(1.0, print)
        admin.do("resume", name=board.name)
        status = next(reply.job for reply in followed if reply.job.name and not reply.job.blocked)
        assert status.name == job


def test_board_receives_grant_once(
    client: Client, board: BareBoard, farm_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Never resend the grant, even on a slow machine.
    monkeypatch.setattr(attached_workers, "_UNHEARD", attached_workers._UNHEARD.replace("2 s", "1 h"))
    client().submit(simple_order())
    grant = board.send_grant()
    taken = "select 1 from procrastinate_jobs where status = 'doing' and (args ->> 'lease')::bigint = %s"
    eventually(lambda: rows(farm_db, taken, grant.lease))
    told = len(board.told("grant"))
    board.hello()
    eventually(lambda: len(board.told("standing")) > 1)
    beats = len(board.told("beat"))
    eventually(lambda: len(board.told("beat")) > beats + 1)
    assert len(board.told("grant")) == told


def test_follow_rejects_empty_selection(client: Client) -> None:
    with pytest.raises(UsageError, match="missing names of jobs"):
        list(client().follow([]))


@pytest.mark.parametrize("name", ["999", "1.7", "x", "9" * 30])
def test_follow_rejects_unknown_job(client: Client, name: str) -> None:
    with pytest.raises(UsageError):
        list(client().follow([name]))


def test_worker_prints_only_to_jobs_with_lease(client: Client, board: BareBoard) -> None:
    farm = client()
    other = BareBoard(client("lab2", Role.HOST), "other").online()
    try:
        _, [job] = farm.submit(simple_order(board="rpi"))
        grant = board.send_grant()
        other.start(grant)
        other.held.add(grant.lease)
        other.hello()
        other.print_message(beat=pb.BoardBeat(leases=[grant.lease]))
        other.print(grant, "forged\n")
        eventually(lambda: grant.lease in {one.lease for one in other.told("ended")})
        assert farm.ask("job", name=job).started_at is None
        board.print(grant, "true\n")
        board.report(grant)
        eventually(lambda: "true" in printed(farm, job))
        assert printed(farm, job) == "true\n"
    finally:
        other.leave()
