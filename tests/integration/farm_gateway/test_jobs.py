"""Jobs at a gateway, from the submission to the result."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
from support.gateways import WAIT_S, BareBoard, rows, simple_order
from support.waiting import eventually

from hil.controller.farm.client import FarmClient
from hil.controller.farm.gateway import attached_workers
from hil.controller.farm.messages import JobResult, JobSpec, Kind, Role
from hil.errors import FarmError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

pytestmark = pytest.mark.daily

Client = Callable[..., FarmClient]


def state_of(farm: FarmClient, job: str) -> str:
    return str(farm.ask("job", name=job)["state"])


def printed(farm: FarmClient, name: str) -> str:
    return "".join(piece["text"] for piece in farm.ask("logs", name=name))


def test_job_goes_to_a_board_and_its_first_result_counts(client: Client, board: BareBoard) -> None:
    farm = client()
    _, [job] = farm.submit(simple_order(selector="chip=a53"))
    grant = board.grant()
    assert (grant.job, grant.board, grant.user, grant.attempt) == (job, "rpi", "anna", 1)
    assert state_of(farm, job) == "running"
    board.start(grant)
    first = JobResult(1, "FAIL", "they differ", record={"mismatches": 3}, board_ns=(1, 2))
    assert board.report(grant, first).recorded
    assert board.report(grant, first).recorded  # the same once more: the answer to the first one was lost
    late = board.report(grant, JobResult(0, "PASS"))
    assert not late.recorded and "over" in late.reason
    [told] = farm.ask("result", name=job)
    assert (told["name"], told["exit_code"], told["outcome"], told["record"]) == (job, 1, "FAIL", {"mismatches": 3})


def test_order_sent_twice_is_queued_once(client: Client, board: BareBoard) -> None:
    farm, order = client(), simple_order(key="the-very-same")
    assert farm.submit(order) == farm.submit(order)
    board.grant()
    assert board.grants.empty()


def test_impossible_order_is_refused_with_the_nearest_boards(client: Client, board: BareBoard) -> None:
    with pytest.raises(FarmError) as refused:
        client().submit(simple_order(selector="chip=a76"))
    assert "rpi" in refused.value.hint and refused.value.exit_code == 4


def test_jobs_wait_for_their_turn(client: Client, board: BareBoard) -> None:
    farm = client()
    _, jobs = farm.submit(simple_order(specs=(JobSpec(Kind.RUN),) * 3))
    seen = []
    for _ in jobs:
        grant = board.grant()
        assert board.grants.empty()
        seen.append(grant.job)
        board.report(grant)
    assert sorted(seen) == sorted(jobs)


def test_cancelled_job_ends_its_lease(client: Client, board: BareBoard) -> None:
    farm = client()
    _, [job] = farm.submit(simple_order())
    grant = board.grant()
    assert farm.do("cancel", name=job) == {"cancelled": [job]}
    ended, *_ = eventually(lambda: [one for one in board.told("ended") if one.lease == grant.lease])
    assert "anna" in ended.reason
    assert farm.ask("result", name=job)[0]["exit_code"] == 130


def test_follow_tells_states_and_logs_until_all_have_ended(client: Client, board: BareBoard) -> None:
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
        grant = board.grant()
        board.start(grant)
        for line in range(20):
            board.print(grant, f"{grant.job} line {line}\n")
        # A report goes another way than the lines, and may come first.
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


def test_board_is_given_a_job_once_though_the_queue_brings_it_too(
    client: Client, board: BareBoard, farm_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow this machine is, nothing is sent again as if it had been lost.
    monkeypatch.setattr(attached_workers, "_UNHEARD", attached_workers._UNHEARD.replace("2 s", "1 h"))
    client().submit(simple_order())
    grant = board.grant()
    taken = "select 1 from procrastinate_jobs where status = 'doing' and (args ->> 'lease')::bigint = %s"
    eventually(lambda: rows(farm_db, taken, grant.lease))
    told = len(board.told("grant"))
    board.hello()
    eventually(lambda: len(board.told("standing")) > 1)
    beats = len(board.told("beat"))
    eventually(lambda: len(board.told("beat")) > beats + 1)
    assert len(board.told("grant")) == told


def test_follower_of_nothing_is_refused(client: Client) -> None:
    with pytest.raises(UsageError, match="which jobs"):
        list(client().follow([]))


@pytest.mark.parametrize("name", ["999", "1.7", "x", "9" * 30])
def test_job_that_there_is_not_cannot_be_followed(client: Client, name: str) -> None:
    with pytest.raises(UsageError):
        list(client().follow([name]))


def test_worker_prints_only_to_jobs_of_its_own(client: Client, board: BareBoard) -> None:
    farm = client()
    other = BareBoard(client("lab2", Role.HOST), "other").online()
    try:
        _, [job] = farm.submit(simple_order(board="rpi"))
        grant = board.grant()
        other.start(grant)
        other.held.add(grant.lease)
        other.hello()
        other.say(beat=pb.BoardBeat(leases=[grant.lease]))
        other.print(grant, "forged\n")
        eventually(lambda: grant.lease in {one.lease for one in other.told("ended")})
        assert farm.ask("job", name=job)["started_at"] is None
        board.print(grant, "true\n")
        board.report(grant)
        eventually(lambda: "true" in printed(farm, job))
        assert printed(farm, job) == "true\n"
    finally:
        other.leave()
