"""An agent put on this very machine, through a shell that needs no SSH."""

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

from hil.controller.devices.board_client import Target
from hil.controller.devices.client import AgentClient
from hil.controller.devices.deploy import ensure, probe
from hil.controller.devices.deploy.ensure import AgentPlace, Recipe, install
from hil.controller.devices.deploy.packages import File, Package, write_package
from hil.controller.devices.deploy.probe import AgentBuild, ask
from hil.errors import BoardBusy, BoardError


def is_gone(pid: int) -> bool:
    """Whether a process has ended, whether or not somebody has asked for its exit code."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return True


def pid_of(shell: Any) -> int:
    return probe.status(shell, "").pid


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
def test_a_real_agent_is_deployed_once_and_removed_without_a_trace(shell: Any):
    said: list[str] = []

    first = ensure.ensure_agent(shell, Recipe.of(["iree"]), folder="", board="here", say=said.append)
    before = len(shell.commands)
    second = ensure.ensure_agent(shell, Recipe.of(["iree"]), folder="", board="here", say=said.append)

    assert len(shell.commands) == before + 1
    assert second == AgentPlace(first.socket, first.folder, first.build, first.python, 0)
    assert first.pushed_bytes > 10e6
    assert any("numpy" in text and "MB" in text for text in said)
    client = AgentClient(Target(f"unix:{first.socket}"), "here")
    described = client.describe()
    client.close()
    assert described.build == first.build
    assert not {one.name: one.error for one in described.runtimes}["iree"]

    state = probe.status(shell, "")
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


def test_runtimes_add_up(shell: Any):
    settings: dict[str, Any] = {"folder": "", "board": "here", "say": print}
    ensure.ensure_agent(shell, Recipe.of(("vendors",)), **settings)

    joined = ensure.ensure_agent(shell, Recipe.of(("iree",)), **settings)

    assert [name.partition("=")[0] for name in probe.status(shell, "").agent.runtimes] == ["iree", "vendors"]
    for runtimes in (("vendors",), ("iree",), ("iree", "vendors")):
        again = ensure.ensure_agent(shell, Recipe.of(runtimes), **settings)
        assert (again.build, again.pushed_bytes) == (joined.build, 0)


def test_another_version_takes_the_place_of_the_first(shell: Any, small: Small):
    first = put(shell, small("first"))
    old = pid_of(shell)

    second = put(shell, small("second"))

    assert second.build != first.build
    assert accepts(second) and pid_of(shell) != old
    assert is_gone(old)


def test_what_two_versions_ago_was_needed_is_dropped(shell: Any, small: Small):
    for text in ("first", "second", "third"):
        put(shell, small(text))

    folder = Path(probe.status(shell, "").folder)
    assert len(list((folder / "packages").iterdir())) == 2
    assert put(shell, small("second")).pushed_bytes == 0


def test_an_agent_in_use_is_waited_for(shell: Any, small: Small):
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


@pytest.mark.ci
def test_an_agent_that_stays_in_use_is_left_alone(shell: Any, small: Small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ensure._WAIT_S, "busy", 0.0)
    place = put(shell, small("first"))
    Path(place.folder, "store", "in-use").touch()

    for change in (lambda: put(shell, small("second")), lambda: probe.clean(shell, "")):
        with pytest.raises(BoardBusy) as caught:
            change()
        assert caught.value.hint
    assert accepts(place)

    assert probe.stop(shell, "", force=True)
    assert not accepts(place)


def test_waiting_ends_though_two_reasons_take_turns(shell: Any, small: Small, monkeypatch: pytest.MonkeyPatch):
    answers = itertools.cycle([{"status": "busy"}, {"status": "locked"}])
    monkeypatch.setattr(ensure, "install", lambda *_, **__: next(answers))
    monkeypatch.setattr(ensure, "_POLL_S", 0.01)
    monkeypatch.setattr(ensure, "_WAIT_S", {"busy": 0.3, "locked": 60.0})
    said: list[str] = []

    with pytest.raises(BoardBusy):
        put(shell, small(), said.append)

    assert len([text for text in said if "waiting" in text]) == 2


def test_an_agent_that_was_killed_is_started_again_from_what_is_there(shell: Any, small: Small):
    place = put(shell, small())
    old = pid_of(shell)
    os.kill(old, signal.SIGKILL)
    eventually(lambda: not pid_of(shell))

    again = put(shell, small())

    assert again == AgentPlace(place.socket, place.folder, place.build, place.python, 0)
    assert accepts(again) and pid_of(shell) != old


def test_a_process_number_that_another_process_got_is_no_agent(shell: Any, small: Small):
    place = put(shell, small())
    probe.stop(shell, "")
    Path(place.folder, "run", "agent.pid").write_text(f"{os.getpid()} {place.build}\n")

    again = put(shell, small())

    assert accepts(again)
    assert pid_of(shell) != os.getpid()


@pytest.mark.ci
def test_a_second_deploy_waits_for_the_first(shell: Any, small: Small):
    first = put(shell, small("first"))
    with lock_held(Path(first.folder)) as release:
        place = put(shell, small("second"), lambda text: release() if "another deploy" in text else None)

    assert accepts(place) and place.build != first.build


def test_two_deploys_at_once_both_succeed(shells: Callable[..., Any], small: Small):
    with ThreadPoolExecutor() as pool:
        places = list(pool.map(lambda shell: put(shell, small()), [shells(), shells(), shells()]))

    assert len({place.build for place in places}) == 1
    assert accepts(places[0])
    agents = subprocess.run(["pgrep", "-f", places[0].socket], capture_output=True, text=True).stdout.split()
    assert agents == [str(pid_of(shells()))]


def test_a_deploy_that_was_cut_goes_on_with_what_had_arrived(shells: Callable[..., Any], tmp_path: Path):
    packages = [write_package(f"{name} 1", {f"{name}.py": File.of(os.urandom(50_000))}, tmp_path) for name in "ab"]
    plan = plan_of(shells(), packages)
    whole = Path(ensure.__file__).with_name("board_side.py").stat().st_size + sum(package.size for package in packages)

    answer = install(shells(cut_after=whole - 10_000), *plan, packages)

    assert answer["status"] == "failed" and "broke" in answer["why"]
    there = shells().home / ".hil" / "packages"
    assert [path.name for path in there.iterdir()] == [packages[0].id]


def test_a_package_that_arrives_damaged_is_refused(shell: Any, tmp_path: Path):
    package = write_package("a 1", {"a.py": File.of(os.urandom(50_000))}, tmp_path)
    data = bytearray(package.path.read_bytes())
    data[len(data) // 2] ^= 1
    package.path.write_bytes(data)
    plan = plan_of(shell, [package])

    answer = install(shell, *plan, [package])

    assert answer["status"] == "failed" and "damaged" in answer["why"]
    assert list((shell.home / ".hil" / "packages").iterdir()) == []


def test_a_package_cannot_write_elsewhere(shell: Any, tmp_path: Path):
    package = write_package("a 1", {"../../outside.py": File.of(b"x")}, tmp_path)
    plan = plan_of(shell, [package])

    answer = install(shell, *plan, [package])

    assert answer["status"] == "failed" and "outside.py" in answer["why"]
    assert not list(shell.home.rglob("outside.py"))


def test_packages_that_somebody_removed_are_sent_anew(shell: Any, small: Small):
    place = put(shell, small())
    probe.stop(shell, "")
    for package in Path(place.folder, "packages").iterdir():
        package.rename(shell.home / package.name)

    assert put(shell, small()).pushed_bytes == place.pushed_bytes


def test_an_agent_that_does_not_start_says_why(shell: Any, small: Small):
    with pytest.raises(BoardError) as caught:
        put(shell, small(main="raise SystemExit('this board has no such thing')"))

    assert "did not start" in caught.value.message
    assert "this board has no such thing" in caught.value.detail
    assert caught.value.stage == "deploy" and caught.value.hint


def test_a_version_that_does_not_start_can_be_followed_by_one_that_does(shell: Any, small: Small):
    with pytest.raises(BoardError):
        put(shell, small(main="1/0"))

    assert accepts(put(shell, small()))


def test_the_agents_words_are_kept(shell: Any, small: Small):
    agent = small().files["hil/agent/__main__.py"].open().read().decode()
    put(shell, small(main=f"print('hello from the agent', flush=True)\n{agent}"))

    assert "hello from the agent" in probe.logs(shell, "")


def test_nothing_of_the_connection_stays_with_the_agent(shell: Any, small: Small):
    put(shell, small())

    pid = pid_of(shell)
    files = {link.name: str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    log = f"{shell.home}/.hil/run/agent.log"
    assert [files[number] for number in "012"] == ["/dev/null", log, log]
    assert not [name for name in files.values() if name.startswith("pipe:")]
    assert os.getsid(pid) == pid


def test_a_python_at_the_end_of_the_path_is_found_once(shells: Callable[..., Any]):
    here = str(Path(sys.executable).resolve())

    seen = ask(shells(path=f"/usr/bin:/bin:{Path(here).parent}"), "probe", "", "", board="here")

    assert [one.path for one in seen.interpreters].count(here) == 1


def test_the_build_is_what_the_agent_is_made_of(shell: Any, small: Small):
    place = put(shell, small())

    state = probe.status(shell, "")
    expected = hashlib.sha256("\n".join([state.agent.python, *sorted(state.agent.packages)]).encode()).hexdigest()[:16]
    assert place.build == state.build == expected
