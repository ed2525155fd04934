"""Boards leased from a farm with `--board farm:SELECTOR` and `hil farm lease`, against an in-process gateway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Ended
from support.fake_farm import CONFIG, FakeFarm, start_hil
from support.models import DIGITS
from support.schemas import check_document
from support.waiting import eventually

import hil as library
from hil.errors import BoardBusy, FarmError

MODEL = DIGITS / "digits_cnn.onnx"


@pytest.fixture
def farm(fake_farm: FakeFarm, start_agent: Callable[..., str], environment: dict[str, str]) -> FakeFarm:
    """Provide a farm with a single board, lab1-sim-1."""
    fake_farm.add("lab1-sim-1", start_agent(module="hil.sim"))
    return fake_farm


@pytest.mark.parametrize("direct", [True, False])
def test_run_leases_farm_board_and_reports_lease(farm: FakeFarm, hil: Callable[..., Ended], direct: bool) -> None:
    board = farm.boards["lab1-sim-1"]
    farm.add("lab1-sim-1", board.agent, direct=direct)
    ended = hil("run", MODEL, "--board", "farm:", "--json")
    assert ended.code == 0, ended.err
    board = ended.document["board"]
    assert (board["name"], board["hw_type"]) == ("lab1-sim-1", "sim")
    assert board["info"]["lease"] == "job 1, lease 1, host-a at lab1"
    assert farm.leases[0].over == "released"
    assert (farm.boards["lab1-sim-1"].dials == 0) is direct


@pytest.mark.slow
def test_run_compiles_with_flags_of_farm_board(
    fake_farm: FakeFarm, start_agent: Callable[..., str], hil: Callable[..., Ended]
) -> None:
    config = CONFIG.replace("target-cpu=host", "target-cpu=generic")
    fake_farm.add("lab1-sim-1", start_agent(module="hil.sim"), config)
    ended = hil("run", MODEL, "--board", "farm:", "--json")
    assert ended.code == 0, ended.err
    assert "--iree-llvmcpu-target-cpu=generic" in json.dumps(ended.document)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("bench", MODEL, MODEL, "--iterations", "20"),
        ("bisect", MODEL),
        ("board", "info"),
        ("board", "ping", "--count", "3"),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else words,
)
def test_other_commands_lease_farm_board(farm: FakeFarm, hil: Callable[..., Ended], words: tuple[object, ...]) -> None:
    ended = hil(*words, "--board", "farm:", "--json")
    assert ended.code == 0, ended.err + ended.out
    assert farm.is_free()
    assert "lab1-sim-1" in ended.out or words[0] == "board"


def test_run_reports_nearest_board_for_unmatched_selector(farm: FakeFarm, hil: Callable[..., Ended]) -> None:
    ended = hil("run", MODEL, "--board", "farm:impossible")
    assert ended.code == 4
    assert "no board of the farm matches" in ended.out + ended.err
    assert "the nearest: sim-1" in ended.out + ended.err


def test_run_reports_queue_position_after_wait_timeout(farm: FakeFarm, hil: Callable[..., Ended]) -> None:
    farm.max_boards = 0
    ended = hil("run", MODEL, "--board", "farm:", "--wait", "1", "--runtime", "onnxruntime")
    assert ended.code == 4
    assert "no farm board became available within 1 s: 3 ahead of you" in ended.out + ended.err
    assert farm.leases[0].over == "released"


def test_run_without_farm_exits_with_usage_error(
    hil: Callable[..., Ended], environment: dict[str, str], tmp_path: Path
) -> None:
    environment |= {"HIL_FARM_HOME": str(tmp_path)}
    ended = hil("run", MODEL, "--board", "farm:")
    assert ended.code == 2
    assert "no farm is running" in ended.err


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_interrupt_returns_farm_board(farm: FakeFarm, environment: dict[str, str], tmp_path: Path, when: str) -> None:
    farm.max_boards = 0 if when == "waiting" else 1
    process = start_hil(environment, tmp_path, "bench", MODEL, "--board", "farm:", "--min-time", "60")
    eventually(lambda: farm.leases and (when == "waiting" or farm.leases[0].board))
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 130
    assert farm.leases[0].over == "released"


def test_lease_rejects_agentless_board(farm: FakeFarm, hil: Callable[..., Ended]) -> None:
    agent = farm.boards["lab1-sim-1"].agent
    farm.add("lab1-sim-1", agent, '[runtime]\nkind = "command"\n')
    for words in (("run", MODEL, "--board", "farm:"), ("farm", "lease", "true")):
        ended = hil(*words)
        assert ended.code == 4, ended
        assert "without an agent cannot be leased" in ended.out + ended.err
        assert "!agentless" in ended.out + ended.err
    assert farm.is_free()


@pytest.mark.slow
def test_bench_reports_reason_of_lost_lease(farm: FakeFarm, environment: dict[str, str], tmp_path: Path) -> None:
    process = start_hil(environment, tmp_path, "bench", MODEL, "--board", "farm:", "--min-time", "60")
    eventually(lambda: farm.leases and farm.leases[0].board)
    time.sleep(4.0)
    farm.end("lab1-sim-1", "cancelled by an admin")
    eventually(lambda: farm.leases[0].told)
    # When a lease ends, the host takes the session so that other sessions are rejected.
    from hil.controller.devices.agent_client.client import AgentClient
    from hil.controller.devices.board_client import AgentEndpoint

    client = AgentClient(AgentEndpoint(farm.boards["lab1-sim-1"].agent), "host")
    client.describe()
    client.open_session("ended", fence=100, wait_s=5, on_wait=print)
    out, err = process.communicate(timeout=60)
    client.close()
    assert process.returncode == 4, out + err
    assert "the lease ended: cancelled by an admin" in out + err


def test_library_connects_to_farm_board(farm: FakeFarm) -> None:
    with library.connect("farm:") as board:
        assert board.name == "lab1-sim-1"
        assert library.run(MODEL, board)
        with pytest.raises(BoardBusy, match=r"within 0\.5 s"):
            library.connect("farm:", wait_s=0.5)
        with pytest.raises(FarmError, match="runtime 'tflite' not found") as caught:
            farm.add("lab1-sim-2", "unix:/nowhere")
            library.connect("farm:", runtime="tflite")
        assert "available runtimes: iree, onnxruntime" in caught.value.hint
    assert farm.is_free()


@pytest.mark.slow
def test_hil_board_variable_sets_default_board(
    hil: Callable[..., Ended], environment: dict[str, str], start_agent: Callable[..., str], tmp_path: Path
) -> None:
    config = tmp_path / "mine.toml"
    own, other = (start_agent(module="hil.sim") for _ in range(2))
    config.write_text(f'[board]\nname = "mine"\nhw_type = "sim"\n[connection]\naddress = "{own}"\nfence = 1000\n')
    environment["HIL_BOARD"] = str(config)
    words = ("--runtime", "onnxruntime", "--json")
    ended = hil("run", MODEL, *words)
    assert ended.document["board"]["name"] == "mine"
    stored = json.loads((tmp_path / ended.document["folder"] / "run.json").read_text())
    assert stored["request"]["board"] == str(config)
    assert hil("run", MODEL, *words, "--runtime-hw-type", "sim").document["board"]["name"] == "sim"
    assert hil("run", MODEL, *words, "--board", other).document["board"]["name"] == other
    suite = hil("suite", "run", MODEL, "--flow", "onnxruntime", "--filter", "*full*", "--json")
    assert {case["board"] for case in suite.document["cases"]} == {"mine"}
    assert hil("board", "info", other, "--json").document["board"] == other
    script = "import hil; print(hil.connect().name)"
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "mine", done.stderr
    # A lower fence is rejected.
    config.write_text(config.read_text().replace("fence = 1000", "fence = 999"))
    refused = hil("run", MODEL, *words)
    assert refused.code == 4
    assert "stale fence 999" in refused.case["reason"]


def test_lease_runs_command_with_board(farm: FakeFarm, hil: Callable[..., Ended]) -> None:
    command = [sys.executable, "-m", "hil.controller.cli.main", "run", MODEL, "--json"]
    ended = hil("farm", "lease", "--for", "5m", "--", *command)
    assert ended.code == 0, ended.err
    assert ended.document["board"]["name"] == "lab1-sim-1"
    assert ended.document["board"]["info"]["lease"] == "job 1, lease 1, host-a at lab1"
    assert "farm board lab1-sim-1" in ended.err
    assert (farm.leases[0].order.timeout_s, farm.leases[0].over) == (300.0, "released")


def test_lease_exits_with_command_exit_code(farm: FakeFarm, hil: Callable[..., Ended]) -> None:
    assert hil("farm", "lease", "--", "sh", "-c", "exit 7").code == 7
    assert hil("farm", "lease", "sh", "-c", "kill -9 $$").code == 137
    assert hil("farm", "lease", "--", "there-is-no-such-command").code == 2
    assert hil("farm", "lease", "--for", "soon", "--", "true").code == 2
    assert len(farm.leases) == 2
    assert farm.is_free()


@pytest.mark.parametrize("stubborn", [False, True])
def test_lease_stops_command_when_lease_ends(
    farm: FakeFarm, environment: dict[str, str], tmp_path: Path, stubborn: bool
) -> None:
    trap = "trap '' TERM; " if stubborn else ""
    process = start_hil(
        environment, tmp_path, "farm", "lease", "--", "bash", "-c", f"{trap}echo $$; while :; do sleep 0.1; done"
    )
    pid = int(process.stdout.readline())
    farm.end("lab1-sim-1", "time limit reached")
    _, err = process.communicate(timeout=90)
    assert process.returncode == 4
    assert "the lease ended: time limit reached" in err
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_lease_without_command_lasts_until_signal(
    farm: FakeFarm, environment: dict[str, str], tmp_path: Path, hil: Callable[..., Ended], number: int
) -> None:
    process = start_hil(environment, tmp_path, "farm", "lease")
    config = Path(process.stdout.readline().strip())
    ended = hil("run", MODEL, "--board", config, "--json")
    assert ended.document["board"]["name"] == "lab1-sim-1"
    process.send_signal(number)
    process.communicate(timeout=90)
    assert process.returncode == 0
    assert farm.leases[0].over == "released"
    assert not config.exists()


def test_lease_prints_board_as_json(farm: FakeFarm, environment: dict[str, str], tmp_path: Path) -> None:
    process = start_hil(environment, tmp_path, "farm", "lease", "--json", "--for", "30m")
    # The document is printed while the lease is active.
    told = "".join(iter(process.stdout.readline, "}\n")) + "}"
    assert not farm.is_free()
    check_document(json.loads(told), "farm lease", "farm")
    assert json.loads(told)["board"] == "lab1-sim-1"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 0


HEEDFUL = "trap 'echo heard; exit' TERM; echo here; while :; do sleep 0.1; done"


def test_lease_forwards_sigterm_to_command(farm: FakeFarm, environment: dict[str, str], tmp_path: Path) -> None:
    process = start_hil(environment, tmp_path, "farm", "lease", "--", "sh", "-c", HEEDFUL)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "heard\n"
    assert farm.leases[0].over == "released"


@pytest.mark.slow
def test_lease_without_waiting_takes_only_free_board(farm: FakeFarm, hil: Callable[..., Ended]) -> None:
    assert hil("farm", "lease", "--wait", "0", "true").code == 0
    farm.max_boards = 0
    ended = hil("farm", "lease", "--wait", "0", "true")
    assert ended.code == 4
    assert "3 ahead of you" in ended.err


@pytest.mark.slow
def test_lease_survives_broken_tunnel(farm: FakeFarm, hil: Callable[..., Ended], tmp_path: Path) -> None:
    board = farm.boards["lab1-sim-1"]
    farm.add("lab1-sim-1", board.agent, direct=False)
    cut = tmp_path / "cut"
    run = " ".join([sys.executable, "-m", "hil.controller.cli.main", "run", str(MODEL), "--json"])

    def break_it() -> None:
        eventually(lambda: farm.leases and farm.leases[0].beats)
        farm.cut()
        eventually(lambda: farm.leases[0].resumed)
        cut.touch()

    breaking = threading.Thread(target=break_it, daemon=True)
    breaking.start()
    ended = hil("farm", "lease", "--", "sh", "-c", f"until test -e {cut}; do sleep 0.1; done; exec {run}")
    breaking.join(60)
    assert ended.code == 0, ended.err
    assert farm.leases[0].resumed == 1
