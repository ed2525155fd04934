"""Deploy an agent on this machine through a shell without SSH."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.deploying import Small, accepts, put
from support.waiting import eventually

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.deploy import ensure, probe
from hil.controller.devices.deploy.ensure import AgentPlace, AgentRecipe, install
from hil.controller.devices.deploy.packages import File, Package, write_package
from hil.controller.devices.deploy.probe import AgentBuild, ask
from hil.errors import BoardBusy, BoardError


def is_gone(pid: int) -> bool:
    """Return True if a process has ended, reaped or not."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return True


def pid_of(shell: Any) -> int:
    return probe.read_status(shell, "").pid


def plan_of(shell: Any, packages: list[Package]) -> tuple[str, AgentBuild]:
    seen = ask(shell, "probe", "", "", board="here")
    return seen.folder, AgentBuild("b", "r", (), seen.interpreters[0].path, tuple(package.id for package in packages))


@contextmanager
def lock_held(folder: Path) -> Iterator[Callable[[], None]]:
    """Another deploy at work; ends when the function is called."""
    with (folder / "run" / "deploy.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.close


@pytest.mark.ci
def test_ensure_agent_deploys_once_and_cleans_up(shell: Any):
    said: list[str] = []

    first = ensure.ensure_agent(shell, AgentRecipe.of(["iree"]), folder="", board="here", say=said.append)
    before = len(shell.commands)
    second = ensure.ensure_agent(shell, AgentRecipe.of(["iree"]), folder="", board="here", say=said.append)

    assert len(shell.commands) == before + 1
    assert second == AgentPlace(first.socket, first.folder, first.build, first.python, 0)
    assert first.pushed_bytes > 10e6
    assert any("numpy" in text and "MB" in text for text in said)
    client = AgentClient(AgentEndpoint(f"unix:{first.socket}"), "here")
    described = client.describe()
    client.close()
    assert described.build == first.build
    assert not {one.name: one.error for one in described.runtimes}["iree"]

    state = probe.read_status(shell, "")
    assert state.build == first.build and state.used_bytes < 90e6
    code = "import numpy.fft, numpy.linalg, numpy.ma, numpy.testing, iree.runtime, grpc, ml_dtypes; "
    code += "numpy.testing.assert_allclose(numpy.linalg.inv(numpy.eye(9) * 2), numpy.eye(9) / 2)"
    paths = ":".join(f"{first.folder}/packages/{name}" for name in state.agent.packages)
    subprocess.run([state.agent.python, "-B", "-c", code], env={"PYTHONPATH": paths}, check=True)

    readable = [path for path in Path(first.folder).rglob("*") if path.lstat().st_mode & 0o077]
    assert readable == []
    assert probe.clean(shell, "").used_bytes
    assert not probe.clean(shell, "").used_bytes
    assert list(shell.home.iterdir()) == []
    assert is_gone(state.pid)


@pytest.mark.slow
def test_ensure_agent_accumulates_runtimes(shell: Any):
    settings: dict[str, Any] = {"folder": "", "board": "here", "say": print}
    ensure.ensure_agent(shell, AgentRecipe.of(("vendors",)), **settings)

    joined = ensure.ensure_agent(shell, AgentRecipe.of(("iree",)), **settings)

    assert [name.partition("=")[0] for name in probe.read_status(shell, "").agent.runtimes] == ["iree", "vendors"]
    for runtimes in (("vendors",), ("iree",), ("iree", "vendors")):
        again = ensure.ensure_agent(shell, AgentRecipe.of(runtimes), **settings)
        assert (again.build, again.pushed_bytes) == (joined.build, 0)


@pytest.mark.ci
def test_new_version_replaces_running_agent(shell: Any, small: Small):
    first = put(shell, small("first"))
    old = pid_of(shell)

    second = put(shell, small("second"))

    assert second.build != first.build
    assert accepts(second) and pid_of(shell) != old
    assert is_gone(old)


@pytest.mark.ci
def test_deploy_drops_packages_of_older_versions(shell: Any, small: Small):
    for text in ("first", "second", "third"):
        put(shell, small(text))

    folder = Path(probe.read_status(shell, "").folder)
    assert len(list((folder / "packages").iterdir())) == 2
    assert put(shell, small("second")).pushed_bytes == 0


@pytest.mark.ci
def test_deploy_waits_for_agent_in_use(shell: Any, small: Small):
    place = put(shell, small("first"))
    in_use = Path(place.folder, "store", "in-use")
    in_use.touch()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "in use" in text:
            in_use.unlink()

    second = put(shell, small("second"), say)

    assert second.build != place.build and accepts(second)
    assert any("in use" in text for text in said)


@pytest.mark.slow
@pytest.mark.ci
def test_deploy_and_clean_leave_busy_agent_running(shell: Any, small: Small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ensure._WAIT_SECONDS, "busy", 0.0)
    place = put(shell, small("first"))
    Path(place.folder, "store", "in-use").touch()

    for change in (lambda: put(shell, small("second")), lambda: probe.clean(shell, "")):
        with pytest.raises(BoardBusy) as caught:
            change()
        assert caught.value.hint
    assert accepts(place)

    assert probe.stop(shell, "", force=True)
    assert not accepts(place)


def test_deploy_wait_ends_despite_alternating_reasons(shell: Any, small: Small, monkeypatch: pytest.MonkeyPatch):
    answers = itertools.cycle([{"status": "busy"}, {"status": "locked"}])
    monkeypatch.setattr(ensure, "install", lambda *_, **__: next(answers))
    monkeypatch.setattr(ensure, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(ensure, "_WAIT_SECONDS", {"busy": 0.3, "locked": 60.0})
    said: list[str] = []

    with pytest.raises(BoardBusy):
        put(shell, small(), said.append)

    assert len([text for text in said if "waiting" in text]) == 2


def test_deploy_restarts_killed_agent_without_upload(shell: Any, small: Small):
    place = put(shell, small())
    old = pid_of(shell)
    os.kill(old, signal.SIGKILL)
    eventually(lambda: not pid_of(shell))

    again = put(shell, small())

    assert again == AgentPlace(place.socket, place.folder, place.build, place.python, 0)
    assert accepts(again) and pid_of(shell) != old


@pytest.mark.ci
def test_deploy_ignores_pid_of_other_process(shell: Any, small: Small):
    place = put(shell, small())
    probe.stop(shell, "")
    Path(place.folder, "run", "agent.pid").write_text(f"{os.getpid()} {place.build}\n")

    again = put(shell, small())

    assert accepts(again)
    assert pid_of(shell) != os.getpid()


@pytest.mark.ci
def test_deploy_waits_for_other_deploy(shell: Any, small: Small):
    first = put(shell, small("first"))
    with lock_held(Path(first.folder)) as release:
        place = put(shell, small("second"), lambda text: release() if "waiting until another deploy" in text else None)

    assert accepts(place) and place.build != first.build


@pytest.mark.ci
def test_concurrent_deploys_start_single_agent(shells: Callable[..., Any], small: Small):
    with ThreadPoolExecutor() as pool:
        places = list(pool.map(lambda shell: put(shell, small()), [shells(), shells(), shells()]))

    assert len({place.build for place in places}) == 1
    assert accepts(places[0])
    agents = subprocess.run(["pgrep", "-f", places[0].socket], capture_output=True, text=True).stdout.split()
    assert agents == [str(pid_of(shells()))]


def test_interrupted_deploy_preserves_received_packages(shells: Callable[..., Any], tmp_path: Path):
    packages = [write_package(f"{name} 1", {f"{name}.py": File.of(os.urandom(50_000))}, tmp_path) for name in "ab"]
    plan = plan_of(shells(), packages)
    whole = Path(ensure.__file__).with_name("board_side.py").stat().st_size + sum(package.size for package in packages)

    answer = install(shells(cut_after=whole - 10_000), *plan, packages)

    assert answer["status"] == "failed" and "broke" in answer["why"]
    there = shells().home / ".hil" / "packages"
    assert [path.name for path in there.iterdir()] == [packages[0].id]


def test_install_rejects_damaged_package(shell: Any, tmp_path: Path):
    package = write_package("a 1", {"a.py": File.of(os.urandom(50_000))}, tmp_path)
    data = bytearray(package.path.read_bytes())
    data[len(data) // 2] ^= 1
    package.path.write_bytes(data)
    plan = plan_of(shell, [package])

    answer = install(shell, *plan, [package])

    assert answer["status"] == "failed" and "corrupted" in answer["why"]
    assert list((shell.home / ".hil" / "packages").iterdir()) == []


def test_install_rejects_package_with_outside_paths(shell: Any, tmp_path: Path):
    package = write_package("a 1", {"../../outside.py": File.of(b"x")}, tmp_path)
    plan = plan_of(shell, [package])

    answer = install(shell, *plan, [package])

    assert answer["status"] == "failed" and "outside.py" in answer["why"]
    assert not list(shell.home.rglob("outside.py"))


@pytest.mark.ci
def test_deploy_resends_deleted_packages(shell: Any, small: Small):
    place = put(shell, small())
    probe.stop(shell, "")
    for package in Path(place.folder, "packages").iterdir():
        package.rename(shell.home / package.name)

    assert put(shell, small()).pushed_bytes == place.pushed_bytes


def test_deploy_reports_cause_of_failed_start(shell: Any, small: Small):
    with pytest.raises(BoardError) as caught:
        put(shell, small(main="raise SystemExit('this board has no such thing')"))

    assert "did not start" in caught.value.message
    assert "this board has no such thing" in caught.value.detail
    assert caught.value.stage == "deploy" and caught.value.hint


def test_deploy_succeeds_after_failed_version(shell: Any, small: Small):
    with pytest.raises(BoardError):
        put(shell, small(main="1/0"))

    assert accepts(put(shell, small()))


def test_logs_return_agent_output(shell: Any, small: Small):
    agent = small().files["hil/agent/__main__.py"].open().read().decode()
    put(shell, small(main=f"print('hello from the agent', flush=True)\n{agent}"))

    assert "hello from the agent" in probe.read_logs(shell, "")


def test_agent_does_not_inherit_connection_files(shell: Any, small: Small):
    put(shell, small())

    pid = pid_of(shell)
    files = {link.name: str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    log = f"{shell.home}/.hil/run/agent.log"
    assert [files[number] for number in "012"] == ["/dev/null", log, log]
    assert not [name for name in files.values() if name.startswith("pipe:")]
    assert os.getsid(pid) == pid


def test_probe_lists_python_once(shells: Callable[..., Any]):
    here = str(Path(sys.executable).resolve())

    seen = ask(shells(path=f"/usr/bin:/bin:{Path(here).parent}"), "probe", "", "", board="here")

    assert [one.path for one in seen.interpreters].count(here) == 1


def test_build_hashes_python_and_packages(shell: Any, small: Small):
    place = put(shell, small())

    state = probe.read_status(shell, "")
    expected = hashlib.sha256("\n".join([state.agent.python, *sorted(state.agent.packages)]).encode()).hexdigest()[:16]
    assert place.build == state.build == expected
