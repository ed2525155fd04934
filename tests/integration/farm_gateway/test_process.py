"""The gateway process: commands, logs, metrics and traces."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.agents import few_files
from support.commands import Ended
from support.farms import running_server
from support.gateways import (
    WAIT_S,
    BareBoard,
    Running,
    gateway_process,
    report,
    running_gateway,
    simple_order,
    token_of,
)
from support.spans import receiving
from support.waiting import eventually

from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.client.lease_session import LeaseSession, lease_order
from hil.controller.farm.database.database import DatabaseAway
from hil.controller.farm.messages import JobResult, JobSpec, Kind, Role
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.settings import FarmSettings
from hil.errors import AccessRefused, BoardBusy, FarmUnreachable, UsageError

Client = Callable[..., FarmClient]
Hil = Callable[..., Ended]


@pytest.fixture
def farm_hil(hil: Hil, gateway: Running, farm_db: str, environment: dict[str, str]) -> Hil:
    """`hil` with an admin token of the gateway."""
    environment |= {"HIL_FARM": gateway.address, "HIL_FARM_TOKEN": token_of(farm_db, "anna")}
    return hil


def test_gateway_process_logs_json_and_exits_cleanly(farm_db: str, tmp_path: Path) -> None:
    with gateway_process(farm_db, tmp_path, "--metrics", "127.0.0.1:0") as (process, said):
        [address] = said["addresses"]
        assert said["pid"] == process.pid and address == f"unix:{tmp_path}/gateway.sock"
        with FarmClient(FarmAddress((address,), token_of(farm_db, "anna"))) as farm:
            board = BareBoard(farm, "rpi").online()
            _, [job] = farm.submit(simple_order())
            board.report(board.send_grant())

            def missing(expected: tuple[str, ...]) -> list[str]:
                with urllib.request.urlopen(f"http://{said['metrics']}/metrics", timeout=WAIT_S) as answer:
                    text = answer.read().decode()
                return [one for one in expected if one not in text]

            expected = (
                'hil_farm_boards{state="online"} 1.0',
                'hil_farm_results_total{outcome="PASS"}',
                'hil_farm_grants_total{kind="run"} 1.0',  # counted after the grant
                "hil_farm_attending 1.0",
            )
            eventually(lambda: not missing(expected))
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
            board.cut()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    [granted] = [line for line in lines if line["event"] == "granted" and line["job"] == job]
    assert granted["board"] == "rpi" and granted["user"] == "anna" and granted["lease"]
    assert not [line for line in lines if line["level"] == "ERROR"]


def test_gateway_restarts_after_kill(farm_db: str, tmp_path: Path) -> None:
    token = token_of(farm_db, "anna")
    with gateway_process(farm_db, tmp_path) as (process, said):
        farm = FarmClient(FarmAddress((said["addresses"][0],), token))
        board = BareBoard(farm, "rpi").online()
        farm.submit(simple_order())
        grant = board.send_grant()
        process.kill()
        eventually(lambda: board.error)
        board.cut()
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(farm.ask("boards")))
        asking.start()  # the client waits for a gateway
    with gateway_process(farm_db, tmp_path):
        asking.join(WAIT_S)
        assert [one.name for one in answers[0]] == ["rpi"]
        again = BareBoard(farm, "rpi", worker=board.worker)
        assert again.send_grant() == grant
        assert again.report(grant).recorded
        again.leave()
    farm.close()


@pytest.mark.slow
def test_frozen_gateway_preserves_leases_after_resume(farm_db: str, tmp_path: Path) -> None:
    (tmp_path / "farm.toml").write_text("[terms]\nlease_s = 6\nowner_s = 6\nbeat_s = 0.2\n")
    token = token_of(farm_db, "anna")
    with (
        gateway_process(farm_db, tmp_path) as (process, said),
        FarmClient(FarmAddress((said["addresses"][0],), token)) as farm,
    ):
        board = BareBoard(farm, "rpi").online()
        _, [job] = farm.submit(simple_order())
        grant = board.send_grant()
        process.send_signal(signal.SIGSTOP)
        time.sleep(9)
        process.send_signal(signal.SIGCONT)
        beats = len(board.told("beat"))
        eventually(lambda: len(board.told("beat")) > beats + 1)
        assert board.report(grant).recorded
        assert farm.ask("job", name=job).attempts == 1
        board.cut()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--db", "nonsense"), "invalid database URL"),
        (("--listen", "0.0.0.0:0"), "TLS"),
        (("--tls-cert", __file__), "without a key"),
        ((), "no database specified"),
    ],
)
def test_gateway_command_rejects_invalid_settings(
    hil: Hil, environment: dict[str, str], tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    environment.pop("HIL_FARM_DB", None)
    given = options if not options or "--db" in options else ("--db", "postgresql:///none", *options)
    ended = hil("farm", "gateway", *given)
    assert ended.code in (2, 4) and told in ended.err and "Traceback" not in ended.err, ended.err


@pytest.mark.slow
def test_gateway_survives_database_restart(tmp_path: Path) -> None:
    settings = FarmSettings(lease_s=6.0, owner_s=6.0, beat_s=0.2)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_server(tmp_path / "postgres"))
        db = server.make_farm("farm")
        running = stack.enter_context(running_gateway(db, tmp_path, settings=settings))
        farm, lab = (stack.enter_context(running.client(token_of(db, user))) for user in ("anna", "lab"))
        impatient = stack.enter_context(running.client(token_of(db, "anna"), patience_s=0))
        board = BareBoard(lab, "rpi").online()
        stack.callback(board.leave)
        _, [job] = farm.submit(simple_order())
        grant = board.send_grant()
        pid = server.embedded.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not server.embedded.is_alive())
        with pytest.raises(FarmUnreachable):  # not an error of the request: the client may retry
            impatient.ask("boards")
        beats, said = len(board.told("beat")), JobResult(0, "PASS")
        reports: list[Any] = []
        told = threading.Thread(
            target=lambda: reports.append(report(farm, grant.lease, board.worker, said, grant.fence))
        )
        told.start()
        time.sleep(settings.lease_s + 2)  # longer than a lease lives without a heartbeat
        server.embedded.start()
        told.join(WAIT_S)
        assert reports[0].recorded  # no lease expired or was lost
        assert farm.ask("job", name=job).attempts == 1
        board.held.clear()
        eventually(lambda: len(board.told("beat")) > beats + 1)
        _, [after] = farm.submit(simple_order())
        assert board.send_grant().job == after
        assert not board.error  # the stream survived


@pytest.mark.slow
def test_gateway_waits_for_late_database(tmp_path: Path) -> None:
    with running_server(tmp_path / "postgres") as server:
        db = server.make_farm("farm")
        server.embedded.stop()
        starting = threading.Timer(1.0, server.embedded.start)
        starting.start()
        with running_gateway(db, tmp_path) as running:
            starting.join()
            with running.client(token_of(db, "anna")) as farm:
                assert farm.ask("boards") == []


def test_gateway_reports_missing_database(tmp_path: Path) -> None:
    db = "postgresql://nobody@127.0.0.1:9/none"
    with pytest.raises(DatabaseAway), running_gateway(db, tmp_path, patience_s=0.5):
        pass


def test_gateway_stages_share_trace(farm_db: str, tmp_path: Path) -> None:
    with receiving() as receiver, running_gateway(farm_db, tmp_path) as running:
        with running.client(token_of(farm_db, "anna")) as farm:
            board = BareBoard(farm, "rpi").online()
            _, [job] = farm.submit(simple_order(), trace=f"00-{'a' * 32}-{'b' * 16}-01")
            grant = board.send_grant()
            board.report(grant)
            board.leave()
        # The gateway reports the queue time together with the sending.
        counted = running.gateway.context.metrics.registry.get_sample_value
        eventually(lambda: counted("hil_farm_grants_total", {"kind": "run"}))
        running.stop()
    mine = [span for span in receiver.spans if span.trace_id.hex() == "a" * 32]
    found = {span.name: span for span in mine}
    assert set(found) == {"submit", "queue", "record"}
    assert found["submit"].parent_span_id.hex() == "b" * 16
    assert grant.trace.split("-")[2] == found["submit"].span_id.hex()
    assert found["queue"].parent_span_id == found["record"].parent_span_id == found["submit"].span_id
    told = {one.key: one.value.string_value for one in found["queue"].attributes}
    assert told["hil.job"] == job and told["hil.board"] == "rpi"


def test_token_commands_add_list_and_revoke(farm_hil: Hil, gateway: Running) -> None:
    made = farm_hil("farm", "token", "add", "bert", "--role", "submitter", "--project", "vision", "--expires", "30d")
    token = made.out.strip()
    assert made.code == 0 and token.startswith("hilf_")
    with gateway.client(token, patience_s=0) as farm:
        assert farm.ask("boards") == []
        listed = farm_hil("farm", "token", "list", "--json")
        [row] = [one for one in listed.document["tokens"] if one["user"] == "bert"]
        assert (row["role"], row["project"], row["good"]) == ("submitter", "vision", True)
        assert "vision" in (text := farm_hil("farm", "token", "list").out) and "until" in text and token not in text
        assert farm_hil("farm", "token", "revoke", row["id"]).code == 0
        with pytest.raises(AccessRefused):
            farm.ask("boards")
    assert "revoked" in farm_hil("farm", "token", "list").out
    assert farm_hil("farm", "token", "revoke", 999).code == 2
    assert farm_hil("farm", "token", "add", "x", "--role", "viewer", "--expires", "soon").code == 2


def test_admin_commands_drain_resume_audit_and_clean(farm_hil: Hil, client: Client) -> None:
    board = BareBoard(client("lab", Role.HOST), "rpi").online()
    assert "is drained" in farm_hil("farm", "drain", "rpi", "--reason", "new cable").out
    assert farm_hil("farm", "resume", "rpi", "--json").document["state"] == "online"
    assert farm_hil("farm", "drain", "rp").code == 2
    audit = farm_hil("farm", "audit", "--limit", "50").out
    assert "Farm.Do drain rpi" in audit
    assert farm_hil("farm", "gc", "--dry-run").out.startswith("would delete nothing")
    assert farm_hil("farm", "gc", "--json").document["dry_run"] is False
    refused = farm_hil("farm", "forget", "rpi")
    assert (refused.code, "still served by" in refused.err) == (2, True)
    board.leave()
    eventually(lambda: client().ask("boards")[0].state == "offline")
    assert farm_hil("farm", "forget", "rpi", "--json").document == {"schema": 1, "board": "rpi", "ended": []}
    assert client().ask("boards") == []
    assert "Farm.Do forget rpi" in farm_hil("farm", "audit", "--limit", "50").out


@pytest.mark.slow
def test_clients_detect_frozen_gateway(farm_db: str, tmp_path: Path) -> None:
    token = token_of(farm_db, "anna")
    with gateway_process(farm_db, tmp_path) as (process, said):
        farm_address = FarmAddress(tuple(said["addresses"]), token)
        with FarmClient(farm_address, patience_s=1.0) as farm, FarmClient(farm_address) as lab:
            board = BareBoard(lab, "rpi").online()
            _, [job] = farm.submit(simple_order())
            board.send_grant()
            followed = farm.follow([job])
            next(followed)
            with LeaseSession(farm_address, lease_order("", "a test")) as waiting:
                eventually(lambda: waiting._waiting.name)
                process.send_signal(signal.SIGSTOP)
                begin = time.monotonic()
                with pytest.raises(BoardBusy, match="no farm board became available within 3 s"):
                    waiting.wait_with_progress(3.0, print)
                assert time.monotonic() - begin < 20
                with pytest.raises(FarmUnreachable):
                    list(followed)
                # 15 s until detection, plus 5 s for a reconnect attempt.
                assert time.monotonic() - begin < 45
            with pytest.raises(FarmUnreachable):
                FarmClient(farm_address)
            process.send_signal(signal.SIGCONT)
            board.cut()


def test_gateway_ignores_body_of_unauthenticated_request(farm_db: str, tmp_path: Path) -> None:
    with gateway_process(farm_db, tmp_path) as (process, said):
        memory = Path(f"/proc/{process.pid}/statm")
        large = b"\x0a\x80\x80\x80\x1e" + bytes(60 << 20)  # a 60 MiB submission
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(said["addresses"][0], options) for _ in range(8)]
        calls = [channel.unary_unary("/hil.v1.Farm/Submit").future(large, timeout=60) for channel in channels]
        highest = before = int(memory.read_text().split()[1])
        while not all(call.done() for call in calls):
            highest = max(highest, int(memory.read_text().split()[1]))
            time.sleep(0.005)
        assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        for channel in channels:
            channel.close()
        grown = (highest - before) * os.sysconf("SC_PAGE_SIZE") >> 20
        print(f"8 orders of 60 MiB each, of strangers: the gateway grew by {grown} MiB")
        assert grown < 150


@pytest.mark.slow
def test_silent_connections_do_not_block_clients(farm_db: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as kept:
        with few_files():
            process, said = kept.enter_context(gateway_process(farm_db, tmp_path))
        [address] = said["addresses"]
        for _ in range(800):
            one = kept.enter_context(socket.socket(socket.AF_UNIX))
            one.settimeout(WAIT_S)
            one.connect(address.removeprefix("unix:"))
        with FarmClient(FarmAddress((address,), token_of(farm_db, "anna"))) as farm:
            assert farm.ask("boards") == []
        # The gateway closes silent connections.
        eventually(lambda: len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 200)


@pytest.mark.slow
def test_long_job_titles_stay_within_memory_limit(farm_db: str, tmp_path: Path) -> None:
    def most() -> int:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return next(int(line.split()[1]) >> 10 for line in status.splitlines() if line.startswith("VmHWM"))

    token = token_of(farm_db, "anna")
    with (
        gateway_process(farm_db, tmp_path) as (process, said),
        FarmClient(FarmAddress((said["addresses"][0],), token)) as farm,
    ):
        board = BareBoard(farm, "rpi").online()
        board.cut()
        specs = (JobSpec(Kind.RUN),) * 12_000
        number, _ = farm.submit(simple_order(title="\U0001f600" * 2000, specs=specs))
        before = most()
        asked: list[tuple[str, dict[str, Any]]] = [
            ("jobs", {"limit": 100_000}),
            ("jobs", {"submission": number, "limit": 100_000}),
            ("result", {"name": str(number)}),
            ("logs", {"name": str(number)}),
        ]
        for what, arguments in asked:
            with pytest.raises(UsageError, match="exceed 16 million characters"):
                farm.ask(what, **arguments)
        assert most() < before + 350
        assert len(farm.ask("jobs", limit=200)) == 200
