"""The previous release's agent, host, gateway and commands work with the current ones. docs/versions.md."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import start_process, stop_process
from support.fake_agent import FakeAgent
from support.releases import PREVIOUS, ROOT, Release, extract_previous
from support.slow import slow_except
from support.waiting import eventually

from hil.core import own_version
from hil.core.processes import make_module_command
from hil.protocol.versions import FARM_PROTOCOL
from hil.protocol.wire import PROTOCOL

NAMES = ("previous", "current")
# Avoids compilation.
RUNTIME = ("--runtime", "onnxruntime")


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> dict[str, Release]:
    folder = tmp_path_factory.mktemp("releases")
    if not extract_previous(folder / "code"):
        pytest.skip(f"needs the commit {PREVIOUS}, which a shallow clone does not have")
    roots = {"previous": folder / "code", "current": ROOT}
    for name in NAMES:
        (folder / name).mkdir()
    made = {name: Release(roots[name], folder / name / "cache", folder / name) for name in NAMES}
    if made["previous"].protocols() != (PROTOCOL, FARM_PROTOCOL):
        pytest.skip(f"{PREVIOUS} speaks other protocols, so it is rejected")
    return made


@pytest.mark.parametrize(("agent", "controller"), slow_except([NAMES, NAMES[::-1]], 0))
def test_agent_serves_controller_of_another_release(releases, agent, controller, doubling, tmp_path):
    environment = releases[agent].environment
    process, address = start_process(
        "hil.sim", f"unix:{tmp_path}/sim.sock", tmp_path / "store", environment=environment
    )
    try:
        ended = releases[controller].hil("run", doubling, *RUNTIME, "--board", address, "--json", cwd=tmp_path)
    finally:
        stop_process(process)
    assert ended.code == 0, ended.err
    assert ended.case["outcome"] == "PASS"


def is_online(release: Release, user: dict[str, str]) -> bool:
    """Check that the farm has an available board."""
    boards = release.hil("farm", "boards", "--json", cwd=ROOT, **user).document["boards"]
    return any(board["state"] == "online" for board in boards)


@contextlib.contextmanager
def running_farm(gateway: Release, host: Release) -> Iterator[dict[str, str]]:
    """Run a farm with a simulator on a host; yield the environment of its user."""
    with tempfile.TemporaryDirectory(prefix="farm-", dir="/tmp") as folder:
        home, elsewhere = Path(folder, "farm"), Path(folder, "host")
        own = {"HIL_FARM_HOME": str(home)}
        started = gateway.hil("farm", "up", "--detach", cwd=Path(folder), **own)
        assert started.code == 0, started.err
        try:
            token = gateway.hil("farm", "token", "add", "lab", "--role", "host", cwd=Path(folder), **own).out.strip()
            user = {"HIL_FARM": f"unix:{home}/gateway.sock", "HIL_FARM_TOKEN": (home / "token").read_text().strip()}
            variables = {**host.environment, **user, "HIL_FARM_TOKEN": token, "HIL_FARM_HOME": str(elsewhere)}
            command = make_module_command("hil", "farm", "host", "--name", "other", "--sim", "1")
            process = subprocess.Popen(command, env=variables, cwd=folder, stdin=subprocess.DEVNULL)
            try:
                eventually(lambda: is_online(gateway, user), every_s=1.0, process=process)
                yield user
            finally:
                process.terminate()
                process.wait(30)
        finally:
            gateway.hil("farm", "down", cwd=Path(folder), **own)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("gateway", "host"), [NAMES, NAMES[::-1]])
def test_gateway_serves_host_and_users_of_another_release(releases, gateway, host, doubling, tmp_path):
    with running_farm(releases[gateway], releases[host]) as user:
        for name in NAMES:
            release = releases[name]
            ended = release.hil("farm", "submit", doubling, *RUNTIME, "--wait", "--json", cwd=tmp_path, **user)
            assert ended.code == 0, f"submitted by {name}: {ended.err}"
        leased = releases[gateway].hil("run", doubling, *RUNTIME, "--board", "farm:", "--json", cwd=tmp_path, **user)
        assert leased.code == 0, leased.err


def test_run_rejects_other_protocol_and_reports_both_versions(hil, doubling, tmp_path):
    with FakeAgent(tmp_path / "a.sock", protocol=PROTOCOL + 1) as agent:
        ended = hil("run", doubling, *RUNTIME, "--board", agent.address, "--json")
    assert (ended.code, ended.case["outcome"]) == (4, "BOARD_REFUSED")
    assert f"hil 1 (agent protocol {PROTOCOL + 1})" in ended.out
    assert f"hil {own_version()} (agent protocol {PROTOCOL})" in ended.out
