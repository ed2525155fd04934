"""Simulator reuse: which commands share a simulator, and when it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.kept import keeping_simulators, process_at
from support.waiting import eventually

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import BoardClient
from hil.controller.devices.links import kept_simulators
from hil.controller.devices.links.link import Link
from hil.controller.devices.links.simulator import open_simulator
from hil.core.boards import load_board

SIM = load_board("sim").config


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a separate directory for the simulators of a test."""
    environment = dict(os.environ)
    with keeping_simulators(environment) as folder:
        monkeypatch.setattr(tempfile, "tempdir", environment["TMPDIR"])
        monkeypatch.delenv("HIL_SIMULATOR")
        yield folder


def process_of(link: Link) -> int:
    return process_at(link.target.address)


def taken(**given: object) -> int:
    """Return the simulator process of a short command."""
    link = open_simulator(SIM, **given)  # type: ignore[arg-type]
    try:
        client: BoardClient = AgentClient(link.target, "sim")
        with contextlib.closing(client):
            assert client.describe(timeout=60).name == "sim"
        return process_of(link)
    finally:
        link.close()


def test_open_simulator_reuses_running_simulator(place: Path) -> None:
    first = taken()
    assert taken() == first
    assert [one.stat().st_mode & 0o077 for one in (place, *place.iterdir())] == [0, 0]


def test_concurrent_commands_use_separate_simulators(place: Path) -> None:
    links = [open_simulator(SIM) for _ in range(2)]
    processes = [process_of(link) for link in links]
    for link in links:
        link.close()
    assert processes[0] != processes[1]
    assert taken() in processes and len(list(place.iterdir())) == 2


def test_idle_simulator_ends_and_removes_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_simulators, "IDLE_SECONDS", 0.1)
    link = open_simulator(SIM)
    process = process_of(link)
    with pytest.raises(AssertionError):  # without a session it still belongs to this command
        eventually(lambda: not list(place.iterdir()), within_s=2)
    os.kill(process, 0)
    link.close()
    eventually(lambda: not list(place.iterdir()))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_open_simulator_replaces_dead_or_hung_simulator(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_simulators, "_ANSWER_SECONDS", 0.3)
    first = taken()
    os.kill(first, number)
    second = taken()
    assert second != first
    assert taken() == second


def test_environment_change_starts_new_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    first = taken()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert taken() != first
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("TERM", "other")
    assert taken() == first


def test_simulator_kind_includes_code_packages_and_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kind depends on code, packages, board config and CPU cores."""
    kind: Callable[[], str] = lambda: kept_simulators._digest_kind(SIM)  # noqa: E731
    kinds = [kind()]
    assert kept_simulators._digest_kind(load_board("sim-f16").config) not in kinds
    package = tmp_path / "hil"
    (package / "agent").mkdir(parents=True)
    (package / "agent" / "server.py").write_text("")
    monkeypatch.setattr(kept_simulators, "PACKAGE", package)
    kinds.append(kind())
    (package / "agent" / "server.py").write_text("pass")
    kinds.append(kind())
    (package / "controller").mkdir()
    (package / "controller" / "none_of_it.py").write_text("pass")
    assert kind() == kinds[-1]
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(packages)
    kinds.append(kind())
    (packages / "numpy-9.dist-info").mkdir()
    os.utime(packages, (1, 1))
    kinds.append(kind())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    kinds.append(kind())
    assert len(set(kinds)) == len(kinds) == 6


def test_simulator_kind_covers_all_imported_code() -> None:
    script = "import sys, hil.sim.__main__, hil.agent.forkserver; print(*(m.__file__ for n, m in sys.modules.items() "
    script += "if n.split('.')[0] == 'hil' and m.__file__), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True, env=environment)
    assert set(told.stdout.split()) <= {name for name, *_ in kept_simulators._iter_files(kept_simulators.PACKAGE)}


def test_faulty_and_fresh_simulators_end_after_use(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(faults=("corrupt",))
    monkeypatch.setenv("HIL_SIMULATOR", "fresh")
    taken()
    assert not place.exists()


def test_open_simulator_ignores_linked_directory(place: Path, tmp_path: Path) -> None:
    place.symlink_to(tmp_path)
    taken()
    assert not list(tmp_path.iterdir())
