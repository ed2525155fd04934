"""A board over SSH on two hosts: the second takes over when the owner fails."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from support.farm_hosts import Host, job_of, result_of, running_host, states, submit
from support.farms import Server, fresh
from support.gateways import Running, running_gateway, token_of
from support.models import DIGITS
from support.sshd import Sshd, running_sshd
from support.waiting import eventually

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.choosing.board_factory import open_board
from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.farm.client import lease_session
from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.client.lease_session import LeaseSession, lease_order
from hil.controller.farm.job_files import pack_run
from hil.controller.farm.messages import JobSpec
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.settings import FarmSettings
from hil.controller.models.importers import import_model
from hil.controller.pipeline.settings.options import Job
from hil.controller.storage.isolation.isolated import Isolated

pytestmark = pytest.mark.timeout(300)

TERMS = FarmSettings(beat_s=0.2, lease_s=6.0, owner_s=6.0, quarantine_s=2.0)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="module")
def farm(database_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    with (
        fresh(database_server, database_server.make_farm) as db,
        running_gateway(db, tmp_path_factory.mktemp("farm"), settings=TERMS) as running,
    ):
        yield running, token_of(db, "anna")


@pytest.fixture(scope="module")
def client(farm: tuple[Running, str]) -> Iterator[FarmClient]:
    with farm[0].client(farm[1]) as client:
        yield client


@pytest.fixture(scope="module")
def spec(client: FarmClient) -> JobSpec:
    model = DIGITS / "digits_cnn.onnx"
    with Isolated(1) as isolated:
        spec, parcel = pack_run(Job((model,), runtime="onnxruntime"), import_model(model, isolated=isolated))
    client.upload(parcel.list_uploads())
    return spec


@pytest.fixture(scope="module")
def hosts(
    farm: tuple[Running, str], client: FarmClient, sshd: Sshd, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Host]]:
    """Start both hosts; the owner is first."""
    config = tmp_path_factory.mktemp("boards") / "bench.toml"
    config.write_text(
        '[board]\nhw_type = "bench"\nruntime = "onnxruntime"\n[labels]\nchip = "x"\n'
        '[devices]\nonnxruntime = "CPUExecutionProvider"\n'
        f'[connection]\naddress = "{sshd.address}"\nidentity = "{sshd.identity}"\nknown_hosts = "{sshd.known_hosts}"\n'
    )
    with open_board(replace(choose(str(config)), runtime="onnxruntime")):
        pass  # deploys the agent before the tests
    with ExitStack() as stack:
        started = []
        for name in ("owner", "other"):
            started.append(stack.enter_context(running_host(*farm, name, "--board", str(config), "--site", "here")))
            eventually(lambda: "bench" in states(client), started[0].said)
        eventually(lambda: states(client)["bench"] == "online", str(client.ask("boards")))
        yield started


def test_farm_runs_job_on_ssh_board(hosts, client, spec):
    (name,) = submit(client, spec, selector="chip=x, runtimes=onnxruntime")
    result = result_of(client, name)
    assert (result["outcome"], result["board"], result["attempts"]) == ("PASS", "bench", 1)
    (board,) = client.ask("boards")
    assert (board.host, board.site) == ("owner", "here") and board.labels["cores"] >= 1


def test_lease_reaches_ssh_board_through_farm(hosts, farm, monkeypatch):
    monkeypatch.setattr(lease_session, "get_machine_id", lambda: "another machine")
    with LeaseSession(FarmAddress((farm[0].address,), farm[1]), lease_order("chip=x", "a test")) as held:
        assert held.wait(20)
        agent = AgentClient(AgentEndpoint(held.address), "bench")
        assert agent.open_session("mine", fence=held.held.grant.fence, on_wait=print)
        agent.close()


def test_host_reconnects_after_sshd_restart(hosts, client, spec, sshd):
    sshd.stop()
    sshd.start()
    (name,) = submit(client, spec)
    result = result_of(client, name)
    assert (result["outcome"], result["attempts"]) == ("PASS", 1), result


@pytest.mark.slow
def test_second_host_takes_over_after_owner_dies(hosts, client, spec):
    owner, other = hosts
    owner.process.send_signal(signal.SIGKILL)
    owner.process.wait(60)
    eventually(lambda: client.ask("boards")[0].host == "other", str(client.ask("boards")))
    (name,) = submit(client, spec)
    assert result_of(client, name)["outcome"] == "PASS" and job_of(client, name).board == "bench"
    assert other.process.poll() is None


@pytest.mark.slow
def test_farm_quarantines_lost_board_until_recovery(hosts, client, spec, sshd):
    sshd.stop()
    try:
        (name,) = submit(client, spec, max_attempts=1)
        result = result_of(client, name)
        assert (result["exit_code"], result["infrastructure"]) == (4, True)
        eventually(lambda: states(client)["bench"] == "quarantined")
    finally:
        sshd.start()
    eventually(lambda: states(client)["bench"] == "online", str(client.ask("boards")))
