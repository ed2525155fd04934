"""The pytest plugin on boards, and with parallel processes that share boards."""

from __future__ import annotations

import json
import signal
import socket
import threading
from pathlib import Path

import pytest
from support.farm_keeper import command_line
from support.plugin_runs import DIGITS_LAYERS, Project, Run, save_small
from support.sshd import started_with
from support.waiting import eventually


@pytest.fixture
def project(tmp_path: Path, environment: dict[str, str]) -> Project:
    return Project(tmp_path / "project", environment)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return save_small(tmp_path)


def boards_of(tested: Run) -> set[str]:
    return {told["hil_board"] for told in tested.properties.values()}


@pytest.mark.parametrize(
    ("faults", "result"),
    [
        pytest.param(["corrupt", "corrupt"], "always wrong", marks=pytest.mark.slow),
        (["corrupt", "slow:rate=1e9,delay=0.1"], "one bad board"),
    ],
)
def test_confirmation_alternates_between_boards(project, small, start_agent, faults, result):
    project.set_up(small)
    boards = [start_agent("--fault", fault, module="hil.sim") for fault in faults]
    words = [f"--board={board}" for board in boards]
    how = ("--hil-no-layers", "--hil-runtime=onnxruntime", "--hil-confirm=2", "--hil-out=out")
    tested = project.test(*words, *how)
    assert tested.code == 1, tested.out
    (line,) = next((project.folder / "out").rglob("results.jsonl")).read_text().splitlines()
    case = json.loads(line)
    assert (case["board"], case["confirmed"]) == (boards[0], result)
    assert [one["board"] for one in case["attempts"]] == boards


def test_unavailable_second_board_ends_confirmation(project, small, start_agent, tmp_path):
    project.set_up(small)
    board = start_agent("--fault", "corrupt", module="hil.sim")
    how = ("--hil-no-layers", "--hil-runtime=onnxruntime", "--hil-confirm=2", "--hil-out=out", "--hil-wait=0")
    tested = project.test(f"--board={board}", f"--board=unix:{tmp_path}/nowhere.sock", *how)
    assert tested.code == 1 and "cannot confirm the mismatch" in tested.out, tested.out
    (line,) = next((project.folder / "out").rglob("results.jsonl")).read_text().splitlines()
    case = json.loads(line)
    assert (case["outcome"], case["board"]) == ("FAIL", board)
    assert [(one["why"], one["board"]) for one in case["attempts"]] == [("confirm", board)]


def test_faults_on_real_board_are_usage_error(project, small, start_agent):
    project.set_up(small)
    tested = project.test(f"--board={start_agent()}", "--hil-fault=corrupt")
    assert tested.code == 4 and "--hil-fault requires a simulator" in tested.out


@pytest.mark.slow
@pytest.mark.board
def test_arm_board_runs_model_and_layers(project, board_aarch64):
    project.set_up("digits_cnn")
    where = ["--board", f"root@{board_aarch64.ip}"]
    how = [f"--hil-identity={board_aarch64.identity}", f"--hil-known-hosts={board_aarch64.known_hosts}"]
    tested = project.test(*where, *how, "-k", "digits")
    assert tested.code == 0, tested.out
    assert len(tested.outcomes) == 1 + DIGITS_LAYERS and set(tested.outcomes.values()) == {"passed"}
    assert all(name.endswith("-generic") for name in tested.outcomes)
    assert boards_of(tested) == {f"root@{board_aarch64.ip}"}


def test_non_ssh_server_fails_with_short_message(project, small):
    def babble(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"this is no SSH server\r\n" * 3)

    project.set_up(small)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=babble, args=(server,), daemon=True).start()
        tested = project.test("--board", f"root@127.0.0.1:{server.getsockname()[1]}", "-k", "full")
    assert tested.code == 1, tested.out
    assert "SSH handshake with" in tested.out and "hint:" in tested.out
    assert "paramiko" not in tested.out and "Traceback" not in tested.out, tested.out


@pytest.mark.slow
def test_xdist_workers_get_separate_simulators(project, small):
    project.set_up(small)
    tested = project.test("-n", "2")
    assert tested.code == 0, tested.out
    assert len(tested.outcomes) == 3 and set(tested.outcomes.values()) == {"passed"}


@pytest.mark.slow
def test_workers_take_turns_on_shared_board(project, start_agent):
    project.set_up("digits_cnn")
    address = start_agent()
    tested = project.test("-n", "2", "--board", address, "--hil-wait", "0")
    assert tested.code == 0, tested.out
    assert len(tested.outcomes) == 1 + DIGITS_LAYERS and set(tested.outcomes.values()) == {"passed"}
    assert boards_of(tested) == {address}


OVERLAP = """
import os, time
import pytest

@pytest.mark.parametrize("again", range(8))
@pytest.mark.hil(layers=False)
def test_alone(hil_board, again):
    # Fails if the file is there already: somebody else has the same board.
    mine = os.open(hil_board.name.removeprefix("unix:") + ".mine", os.O_CREAT | os.O_EXCL)
    time.sleep(0.3)
    os.close(mine)
    os.unlink(hil_board.name.removeprefix("unix:") + ".mine")
"""


def test_workers_use_all_boards_exclusively(project, small, start_agent):
    project.set_up(small)
    project.write("test_alone.py", OVERLAP)
    boards = [start_agent(), start_agent()]
    named = [word for board in boards for word in ("--board", board)]
    tested = project.test("test_alone.py", "-n", "3", *named, "--hil-wait", "0")
    assert tested.code == 0, tested.out
    assert len(tested.outcomes) == 8


@pytest.mark.slow
def test_busy_board_fails_after_hil_wait(project, small, start_agent, open_client):
    project.set_up(small)
    address = start_agent()
    open_client(address)
    tested = project.test("-k", "Relu", "--board", address, "--hil-wait", "0.5")
    assert tested.code == 1 and list(tested.outcomes.values()) == ["error"]
    (told,) = tested.properties.values()
    assert told["hil_outcome"] == "BOARD_BUSY" and told["hil_board"] == address


def test_ctrl_c_stops_run_and_child_processes(project):
    project.set_up("digits_cnn")
    project.write(
        "test_long.py", "import time\n\ndef test_long(hil_board):\n    print('here', flush=True)\n    time.sleep(60)\n"
    )
    process = project.start("test_long.py", "-s")
    assert process.stdout is not None
    for line in process.stdout:
        if "here" in line:
            break
    assert len(ours(project)) > 1
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 2, rest
    assert "KeyboardInterrupt" in rest
    eventually(lambda: not ours(project))


def ours(project: Project) -> list[str]:
    """Return the command lines of the processes started from a project."""
    return [line for pid in started_with(f"HOME={project.environment['HOME']}") if (line := command_line(pid))]


CONFTEST = "def pytest_addoption(parser):\n    parser.addoption('--board', default='a desk')\n"


def test_plugin_without_models_stays_inactive(project):
    project.write("pytest.ini", "[pytest]\n")
    project.write("conftest.py", CONFTEST)
    project.write("test_it.py", "def test_it(request):\n    assert request.config.getoption('--board') == 'x'\n")
    assert project.test("--board", "x").code == 0
    assert "hil_" not in project.test().out


def test_plugin_reports_option_conflict_with_conftest(project, small):
    project.set_up(small)
    project.write("conftest.py", CONFTEST)
    tested = project.test()
    assert tested.code == 4 and "--board" in tested.out and "hil_models" in tested.out


@pytest.mark.slow
def test_plugin_yields_conflicting_option_to_other_plugin(project, small):
    project.set_up(small, ini="pythonpath = .")
    project.write("desks.py", CONFTEST)
    tested = project.test("-p", "desks", "--hil-board", "sim-f16", "--board", "x", "-k", "Relu")
    assert tested.code == 0, tested.out
    assert boards_of(tested) == {"sim-f16"}
    assert "--board is used by a different plugin: use --hil-board" in tested.out


def test_fixture_without_models_reports_missing_setting(project):
    project.write("pytest.ini", "[pytest]\n")
    project.write("test_it.py", "def test_it(hil_result): pass\n")
    tested = project.test()
    assert tested.code == 2 and "set hil_models" in tested.out
