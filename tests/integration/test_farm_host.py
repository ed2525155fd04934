"""Jobs on a host with two simulated boards, a gateway and a database, with failures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.farm_hosts import Host, job_of, owners_at_once, result_of, running_host, states, submit
from support.farms import Server, fresh
from support.gateways import Running, running_gateway, token_of
from support.models import DIGITS
from support.step_programs import save_summing_model
from support.waiting import eventually

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.farm.client import lease_session
from hil.controller.farm.client.lease_session import LeaseSession, lease_order
from hil.controller.farm.job_files import pack_run
from hil.controller.farm.messages import JobSpec, Kind
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.settings import FarmSettings
from hil.controller.models.importers import import_model
from hil.controller.pipeline.settings.options import Job
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.workloads.suites.request import SuiteRequest
from hil.core.files import digest_file
from hil.errors import BoardError

pytestmark = pytest.mark.timeout(400)

DIGITS_CNN = DIGITS / "digits_cnn.onnx"
PACE_S = 0.2
TERMS = FarmSettings(beat_s=0.2, lease_s=6.0, owner_s=6.0, quarantine_s=2.0, quarantine_most_s=5.0)


class Lab:
    """Provide a farm whose host has two boards; a run takes PACE_S."""

    def __init__(self, farm: Running, token: str, host: Host, specs: dict[str, JobSpec]) -> None:
        self.running, self.token, self.host, self.specs = farm, token, host, specs
        self.address = FarmAddress((farm.address,), token)
        self.client = farm.client(token)

    def ready(self) -> None:
        """Wait until both boards are online and idle."""
        eventually(lambda: list(states(self.client).values()) == ["online", "online"], str(self.client.ask("boards")))
        eventually(lambda: not self.client.ask("jobs", state=["running"]))

    def begun(self, spec: JobSpec | None = None, **settings: Any) -> tuple[str, str]:
        """Submit a long job and wait until it runs; return the names of job and board."""
        (name,) = submit(self.client, spec or self.specs["long"], **settings)
        made = eventually(lambda: job_of(self.client, name).attempts_made)[-1]
        begins = {"what": "invoke begins", "fence": made.fence}
        eventually(
            lambda: any(begins.items() <= line.items() for line in self.host.journal(made.board)), self.host.said
        )
        return name, made.board


@pytest.fixture(scope="module")
def lab(database_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    with (
        fresh(database_server, database_server.make_farm) as db,
        running_gateway(db, folder, settings=TERMS) as farm,
        running_host(farm, token_of(db, "lab"), "lab", "--sim", "2", "--sim-fault", f"pace:seconds={PACE_S}") as host,
    ):
        (folder / "broken.onnx").write_bytes(b"this is no model")
        with Isolated(1) as isolated, farm.client(token_of(db, "anna")) as client:
            model = import_model(DIGITS_CNN, isolated=isolated)
            specs = {}
            for name, iterations in (("short", 1), ("long", 100)):
                job = Job((DIGITS_CNN,), runtime="onnxruntime", iterations=iterations)
                specs[name], parcel = pack_run(job, model)
                client.upload(parcel.list_uploads())
            decoder = save_summing_model(folder / "decoder.onnx")
            (folder / "generate.toml").write_text("[[prompt]]\ntokens = [1, 4, 2]\n")
            job = Job((decoder,), generate=folder / "generate.toml", runtime="onnxruntime", iterations=100)
            specs["generation"], parcel = pack_run(job, import_model(decoder, isolated=isolated))
            client.upload(parcel.list_uploads())
            digest = digest_file(folder / "broken.onnx")
            client.upload({digest: folder / "broken.onnx"})
            specs["broken"] = JobSpec(Kind.RUN, {"models": ["m.onnx"]}, {"m.onnx": digest})
        made = Lab(farm, token_of(db, "anna"), host, specs)
        yield made
        made.ready()
        for board in ("lab-sim-1", "lab-sim-2"):
            assert owners_at_once(host.journal(board)) == 1
        made.client.close()
        made.running.stop()  # the gateway may have been restarted


@pytest.fixture(autouse=True)
def ready(lab: Lab) -> None:
    lab.ready()


def test_farm_job_stores_result_and_files(lab, tmp_path):
    (name,) = submit(lab.client, lab.specs["short"])
    result = result_of(lab.client, name)
    assert (result["exit_code"], result["outcome"], result["reason"]) == (0, "PASS", "")
    assert result["timings"].keys() == {"open", "fetch", "run", "upload"} and result["timings"]["run"] >= PACE_S
    begun, given_back = result["board_ns"]
    assert PACE_S * 1e9 <= given_back - begun < 60e9
    lab.client.download(result["files"]["run.json"], tmp_path / "run.json")
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["cases"] == result["record"]["cases"] and record["board"]["name"] == result["board"]
    assert any(path.endswith("logits.npy") for path in result["files"])


def test_farm_client_follows_log_of_running_job(lab):
    name, _ = lab.begun()
    said: list[str] = []
    for reply in lab.client.follow([name], logs=True):
        if reply.WhichOneof("kind") == "log":
            said.append(reply.log.text)
            if "digits_cnn: run" in "\n".join(said):
                break
    assert job_of(lab.client, name).state == "running"
    lab.client.do("cancel", name=name)


def test_farm_does_not_retry_import_error(lab):
    (name,) = submit(lab.client, lab.specs["broken"])
    result = result_of(lab.client, name)
    assert (result["exit_code"], result["outcome"], result["infrastructure"]) == (3, "IMPORT_ERROR", False)
    assert result["attempts"] == 1 and set(states(lab.client).values()) == {"online"}


def test_farm_reports_invalid_job_as_usage_error(lab):
    (name,) = submit(lab.client, JobSpec(Kind.RUN, {"models": 7}))
    result = result_of(lab.client, name)
    assert (result["exit_code"], result["attempts"]) == (2, 1) and "invalid job: " in result["reason"]


def test_suite_job_runs_all_cases_on_leased_board(lab):
    request = SuiteRequest("suite", flow="onnxruntime", layers=False)
    files = {f"suite/{name}.onnx": next(iter(lab.specs["short"].files.values())) for name in ("one", "two")}
    (name,) = submit(lab.client, JobSpec(Kind.SUITE, json.loads(json.dumps(request.to_json())), files))
    result = result_of(lab.client, name)
    assert (result["exit_code"], result["outcome"]) == (0, "PASS"), result["reason"]
    assert {case["board"] for case in result["record"]["cases"]} == {result["board"]}
    assert len(result["record"]["cases"]) == 2 and "results.jsonl" in result["files"]


@pytest.mark.parametrize("kind", ["long", pytest.param("generation", marks=pytest.mark.slow)])
def test_cancelled_job_frees_board(lab, kind):
    name, board = lab.begun(lab.specs[kind])
    lab.client.do("cancel", name=name)
    begin = time.monotonic()
    (after,) = submit(lab.client, lab.specs["short"], board=board)
    assert result_of(lab.client, after)["outcome"] == "PASS" and time.monotonic() - begin < 60
    ended = [line for line in lab.host.journal(board) if line["what"] == "invoke ended"]
    assert "error" in ended[-2] and "error" not in ended[-1]


def test_job_times_out_at_limit(lab):
    (name,) = submit(lab.client, lab.specs["long"], timeout_s=2.0)
    result = result_of(lab.client, name)
    assert (result["exit_code"], result["outcome"], result["attempts"]) == (3, "TIMEOUT", 1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "agent"])
def test_farm_retries_job_after_worker_or_agent_kill(lab, victim):
    name, board = lab.begun(_of_seconds(lab, 8))
    os.kill(getattr(lab.host, victim)(board), signal.SIGKILL)
    result = result_of(lab.client, name)
    assert (result["outcome"], result["attempts"]) == ("PASS", 2)


@pytest.mark.parametrize("away_s", [1, 6], ids=["and is back", "and ends before it is back"])
def test_job_continues_during_gateway_outage(lab, away_s):
    name, _ = lab.begun(_of_seconds(lab, 3))
    lab.running.stop()
    time.sleep(away_s)
    lab.running = Running(lab.running.config)
    result = result_of(lab.client, name)
    assert (result["outcome"], result["attempts"]) == ("PASS", 1)


@pytest.mark.slow
def test_job_continues_while_host_reconnects(lab):
    name, board = lab.begun(_of_seconds(lab, 3))
    worker = lab.host.worker(board)
    os.kill(lab.host.uplink(), signal.SIGKILL)
    result = result_of(lab.client, name)
    assert (result["outcome"], result["attempts"], lab.host.worker(board)) == ("PASS", 1, worker)


def test_boards_turn_offline_while_host_disconnected(lab):
    lab.ready()
    uplink = lab.host.uplink()
    os.kill(uplink, signal.SIGSTOP)
    try:
        eventually(lambda: set(states(lab.client).values()) == {"offline"})
    finally:
        os.kill(uplink, signal.SIGCONT)
    lab.ready()
    (after,) = submit(lab.client, lab.specs["short"])
    assert result_of(lab.client, after)["outcome"] == "PASS"


@pytest.mark.slow
def test_worker_frozen_past_lease_stops_using_board(lab):
    name, board = lab.begun(board="lab-sim-1")
    worker = lab.host.worker(board)
    os.kill(worker, signal.SIGSTOP)
    try:
        eventually(lambda: states(lab.client)[board] == "offline")
        assert job_of(lab.client, name).state == "queued"
        lab.client.do("cancel", name=name)
    finally:
        os.kill(worker, signal.SIGCONT)
    lab.ready()
    (after,) = submit(lab.client, lab.specs["short"], board=board)
    assert result_of(lab.client, after)["outcome"] == "PASS"
    assert result_of(lab.client, name)["state"] == "cancelled"


def test_farm_regains_board_after_outside_use(lab):
    lab.ready()
    client = AgentClient(AgentEndpoint(lab.host.address("lab-sim-2")), "beside")
    seen = client.describe().fence
    client.open_session("takes it", fence=seen + 50, on_wait=print)
    client.close()
    (name,) = submit(lab.client, lab.specs["short"], board="lab-sim-2")
    result = result_of(lab.client, name)
    assert result["outcome"] == "PASS" and result["attempts"] <= 2
    assert lab.host.journal("lab-sim-2")[-1]["fence"] > seen + 50


@pytest.mark.parametrize("near", [True, False], ids=["same machine", "through the farm"])
def test_lease_reaches_agent_only_during_lease(lab, near, monkeypatch):
    if not near:
        monkeypatch.setattr(lease_session, "get_machine_id", lambda: "another machine")
    with LeaseSession(lab.address, lease_order("simulated", "a test")) as held:
        assert held.wait(20)
        assert (held.address == held.held.card.direct) is near
        client = AgentClient(AgentEndpoint(held.address), held.held.card.name)
        assert client.open_session("mine", fence=held.held.grant.fence, on_wait=print) == held.held.grant.fence
        described = client.describe()
        assert described.holder.purpose == "mine"
    if not near:
        with pytest.raises(BoardError):
            client.describe(timeout=1)
    client.close()
    lab.ready()


@pytest.mark.parametrize("near", [True, False], ids=["same machine", "through the farm"])
def test_lease_session_rejects_other_fences(lab, near, monkeypatch):
    if not near:
        monkeypatch.setattr(lease_session, "get_machine_id", lambda: "another machine")
    lab.ready()
    with LeaseSession(lab.address, lease_order("name=lab-sim-1", "an attack")) as held:
        assert held.wait(20)
        fence, client = held.held.grant.fence, AgentClient(AgentEndpoint(held.address), "lab-sim-1")
        for other in (2**64 - 1, 2**63, 2**62 - 1, fence + 1, fence - 1, 0):
            with pytest.raises(BoardError, match=f"must use fence {fence}, got {other}"):
                client.open_session("mine for good", fence=other, on_wait=print)
        assert client.open_session("mine", fence=fence, on_wait=print) == fence
        assert client.describe().fence == fence
        client.close()
    lab.ready()
    (name,) = submit(lab.client, lab.specs["short"], board="lab-sim-1")
    assert result_of(lab.client, name)["outcome"] == "PASS"
    assert lab.host.journal("lab-sim-1")[-1]["fence"] == fence + 1


def test_stopped_host_requeues_jobs(lab):
    name, _ = lab.begun(_of_seconds(lab, 8))
    begin = time.monotonic()
    lab.host.stop()
    assert time.monotonic() - begin < 60
    eventually(lambda: job_of(lab.client, name).state == "queued")
    eventually(lambda: set(states(lab.client).values()) == {"offline"})
    lab.host.start()
    result = result_of(lab.client, name)
    assert result["outcome"] == "PASS"


def test_killed_host_restarts_without_orphan_processes(lab):
    lab.begun(max_attempts=1)
    lab.host.process.kill()
    lab.host.process.wait(60)
    lab.host.start()
    lab.ready()

    def orphans() -> list[int]:
        found = []
        for pid in lab.host.processes():
            with contextlib.suppress(OSError):  # the process has ended
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                found += [pid] * (parent == "1")
        return found

    eventually(lambda: not orphans())


@pytest.mark.slow
def test_host_rejects_duplicate_name_on_machine(lab):
    command = [sys.executable, "-m", "hil", "farm", "host", "--name", "lab", "--sim", "1"]
    done = subprocess.run(command, env=lab.host.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4 and "host lab is already running" in done.stderr


def _of_seconds(lab: Lab, seconds: float) -> JobSpec:
    spec = lab.specs["short"]
    return JobSpec(
        spec.kind, {**spec.options, "iterations": max(1, round(seconds / PACE_S))}, spec.files, spec.affinity
    )
