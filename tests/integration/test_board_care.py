"""Board commands on real boards: check, info, deploy, shell, clean, reset and recover; programs for the wrong CPU."""

from __future__ import annotations

import http.server
import json
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.schemas import check_document

from hil.controller.backends.targets import choose_iree_target
from tools.virtual_board import VirtualBoard

F16_MATMUL = """
func.func @main(%a: tensor<32x32xf16>, %b: tensor<32x32xf16>) -> tensor<32x32xf16> {
  %zero = arith.constant 0.0 : f16
  %empty = tensor.empty() : tensor<32x32xf16>
  %init = linalg.fill ins(%zero : f16) outs(%empty : tensor<32x32xf16>) -> tensor<32x32xf16>
  %c = linalg.matmul ins(%a, %b : tensor<32x32xf16>, tensor<32x32xf16>)
                     outs(%init : tensor<32x32xf16>) -> tensor<32x32xf16>
  return %c : tensor<32x32xf16>
}
"""
GOOD = [
    "name",
    "port",
    "host key",
    "login",
    "system",
    "folder",
    "disk",
    "shared memory",
    "python",
    "agent",
    "clock",
    "memory",
]


def at(board: VirtualBoard) -> list[str]:
    """Return the arguments that select a board."""
    return [board.address, "--identity", str(board.identity), "--known-hosts", str(board.known_hosts)]


def config(folder: Path, board: VirtualBoard, *more: str) -> Path:
    """Write a config for a board."""
    path = folder / "lab.toml"
    lines = ["[connection]", f'address = "{board.address}"', f'identity = "{board.identity}"']
    path.write_text("\n".join([*lines, f'known_hosts = "{board.known_hosts}"', *more, ""]))
    return path


@contextmanager
def lab_socket(switch: Callable[[str], None]) -> Iterator[str]:
    """Serve an HTTP power unit and yield its address; the request path is the action."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            switch(self.path.removeprefix("/"))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def valid(ended, verb: str) -> dict:
    """Validate the document of `hil board VERB --json` against its schema."""
    check_document(ended.document, f"board {verb}")
    return ended.document


def states(document: dict) -> dict[str, str]:
    return {one["name"]: one["state"] for one in document["checks"]}


# ---- checks


@pytest.mark.board
def test_board_check_passes_healthy_board(hil, board_x86):
    ended = hil("board", "check", *at(board_x86), "--json")
    assert ended.code == 0, ended.out
    found = states(valid(ended, "check"))
    assert {name: found.get(name) for name in (*GOOD, "runtime iree", "program")} == dict.fromkeys(
        (*GOOD, "runtime iree", "program"), "pass"
    )
    assert ended.document["ok"] is True
    shown = hil("board", "check", *at(board_x86))
    assert (shown.code, "FAIL" in shown.out) == (0, False)
    assert "pass  program" in shown.out


@pytest.mark.board
def test_board_check_fails_for_unpinned_host_key(hil, board_x86, tmp_path):
    place = [board_x86.address, "--identity", board_x86.identity, "--known-hosts", tmp_path / "empty"]
    ended = hil("board", "check", *place, "--json")
    assert ended.code == 4
    assert list(states(ended.document).items())[-1] == ("host key", "fail")
    assert "--accept-new-host-key" in ended.document["checks"][-1]["fix"]


@pytest.mark.board
def test_board_check_fails_for_refused_login(hil, board_x86, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    place = [board_x86.address, "--identity", tmp_path / "other", "--known-hosts", board_x86.known_hosts]
    ended = hil("board", "check", *place)
    assert ended.code == 4
    assert "FAIL  login" in ended.out
    assert "fix:" in ended.out


@pytest.mark.parametrize(
    ("address", "failing", "said"),
    [
        ("root@nowhere.invalid", "name", "cannot resolve host name"),
        ("root@127.0.0.1:{closed}", "port", "no response from"),
        ("root@127.0.0.1:{other}", "port", "is not an SSH server: it sent 'HTTP/1.1 200'"),
        ("root@127.0.0.1:{dumb}", "port", "is not an SSH server: it sent nothing"),
    ],
)
def test_board_check_reports_unreachable_host_or_port(hil, address, failing, said):
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as dumb:
        ports = {"other": other.getsockname()[1], "dumb": dumb.getsockname()[1], "closed": 1}
        greet = threading.Thread(target=_greet, args=(other, b"HTTP/1.1 200\r\n"), daemon=True)
        hang_up = threading.Thread(target=_greet, args=(dumb, b""), daemon=True)
        greet.start()
        hang_up.start()
        ended = hil("board", "check", address.format(**ports), "--json")
    assert ended.code == 4
    last = ended.document["checks"][-1]
    assert (last["name"], last["state"]) == (failing, "fail")
    assert said in last["found"]
    assert last["fix"]


def _greet(server: socket.socket, words: bytes) -> None:
    try:
        link, _ = server.accept()
    except OSError:
        return
    with link:
        link.sendall(words)


def test_board_check_passes_simulator(hil):
    ended = hil("board", "check", "sim", "--json")
    assert ended.code == 0
    assert states(ended.document)["program"] == "pass"
    hil_two = hil("board", "check", "sim", "--board", "sim")
    assert hil_two.code == 2


@pytest.mark.slow
@pytest.mark.board
def test_board_check_warns_about_missing_python(hil, make_board):
    board = make_board()
    board.run(["sh", "-c", "rm /usr/bin/python3*"], check=True)
    ended = hil("board", "check", *at(board), "--json")
    found = states(ended.document)
    assert (ended.code, found["python"], found["agent"], found["program"]) == (0, "warn", "skip", "pass")


@pytest.mark.slow
@pytest.mark.board
def test_board_info_and_check_describe_command_runtime(hil, board_x86, tmp_path):
    path = config(tmp_path, board_x86, "folder = 'care-command'", "[runtime]", "kind = 'command'")
    shown = hil("board", "info", path)
    assert (shown.code, "by the command iree-run-module" in shown.out) == (0, True)
    assert "cores" in shown.out
    vendors = ["[runtime]", "kind = 'command'", "program = 'no-such-tool'", "[board]", "runtime = 'vendor'"]
    path = config(tmp_path, board_x86, "folder = 'care-command'", *vendors)
    assert "vendor by the command no-such-tool" in hil("board", "info", path).out
    ended = hil("board", "check", path, "--json")
    assert (ended.code, states(ended.document)["command"]) == (4, "fail")
    path.write_text(path.read_text().replace("no-such-tool", "true"))
    ended = hil("board", "check", path, "--json")
    found = states(valid(ended, "check"))
    assert (ended.code, found["command"], found["program"]) == (0, "pass", "skip")


def test_board_check_reports_invalid_ssh_config_port(hil, environment):
    home = Path(environment["HOME"])
    (home / ".ssh").mkdir(parents=True, exist_ok=True)
    (home / ".ssh" / "config").write_text("Host odd\nHostName 127.0.0.1\nPort many\n")
    ended = hil("board", "check", "ssh:odd")
    assert (ended.code, "Bad port 'many'" in ended.err) == (2, True)


# ---- info, deploy, shell and clean


@pytest.mark.board
def test_board_deploy_info_and_clean_manage_agent(hil, make_board):
    board = make_board()
    first = valid(hil("board", "deploy", *at(board), "--json"), "deploy")
    again = valid(hil("board", "deploy", *at(board), "--json"), "deploy")
    assert first["pushed_bytes"] > 1_000_000
    assert (again["pushed_bytes"], again["build"]) == (0, first["build"])
    assert any(runtime.startswith("iree") for runtime in first["runtimes"])

    known = valid(hil("board", "info", *at(board), "--json"), "info")
    assert known["info"]["build"] == first["build"]
    assert known["host_key"].startswith("SHA256:")
    assert known["info"]["machine"]["boot_id"] == board.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout.strip()
    shown = hil("board", "info", *at(board)).out
    assert first["build"] in shown
    assert known["host_key"] in shown

    pinged = valid(hil("board", "ping", *at(board), "--count", 5, "--json"), "ping")
    trips = pinged["round_trip"]
    assert 0 < trips["min_ns"] <= trips["median_ns"] <= trips["max_ns"]
    assert pinged["count"] == 5

    assert "agent.sock" in hil("board", "logs", *at(board)).out
    kill = f"kill -9 $(cut -d' ' -f1 {first['folder']}/run/agent.pid)"
    subprocess.run([*board.ssh(), kill], check=True)
    assert "agent.sock" in "".join(valid(hil("board", "logs", *at(board), "--json"), "logs")["lines"])

    folder = first["folder"]
    assert board.run(["test", "-d", folder]).returncode == 0
    removed = valid(hil("board", "clean", *at(board), "--json"), "clean")
    assert (removed["folder"], removed["removed"]) == (folder, True)
    assert board.run(["test", "-e", folder]).returncode == 1
    assert valid(hil("board", "clean", *at(board), "--json"), "clean")["removed"] is False


@pytest.mark.slow
@pytest.mark.board
def test_board_reset_fence_repairs_fence_over_ssh(hil, make_board):
    board = make_board()
    folder = valid(hil("board", "deploy", *at(board), "--json"), "deploy")["folder"]
    damage = f"kill $(cut -d' ' -f1 {folder}/run/agent.pid); sleep 3; echo rubbish > {folder}/store/fence"
    subprocess.run([*board.ssh(), damage], check=True)
    told = hil("board", "info", *at(board))
    assert (told.code, "hil board reset-fence" in told.err) == (4, True)
    done = valid(hil("board", "reset-fence", *at(board), "--json"), "reset-fence")
    assert done == {"schema": 1, "board": board.address, "fence": 0}
    assert hil("board", "info", *at(board)).code == 0


@pytest.mark.board
def test_board_shell_passes_arguments_unchanged(hil, board_x86):
    ended = hil("board", "shell", *at(board_x86), "--", "printf", "%s|", "$(id)", "a  b", "*")
    assert (ended.code, ended.out) == (0, "$(id)|a  b|*|")
    assert hil("board", "shell", *at(board_x86), "--", "sh", "-c", "exit 7").code == 7


def test_board_commands_reject_simulator_without_ssh(hil):
    for verb in ("shell", "deploy", "clean"):
        ended = hil("board", verb, "sim")
        assert (ended.code, "is not reached over SSH" in ended.err) == (2, True)
    ended = hil("board", "reset-fence", "sim")
    assert (ended.code, "--store" in ended.err) == (2, True)


# ---- power


@pytest.mark.board
def test_board_reset_reboots_board(hil, make_board, tmp_path):
    board = make_board()
    boots = [board.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout]
    with lab_socket(lambda action: board.reboot(wait=False)) as unit:
        path = config(tmp_path, board, "[power]", f'reset = {{ url = "{unit}/reset" }}')
        ended = hil("board", "reset", path, "--json")
        boots.append(board.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout)
    assert (ended.code, ended.document["action"], ended.document["answers"]) == (0, "reset", True)
    valid(ended, "reset")
    assert boots[0] != boots[1]


@pytest.mark.board
def test_run_resets_then_power_cycles_hung_board(hil, make_board, tmp_path, doubling):
    board = make_board()
    done: list[str] = []

    def switch(action: str) -> None:
        done.append(action)
        if action == "cycle":  # this board ignores the reset
            board.reboot(wait=False)

    with lab_socket(switch) as unit:
        hooks = [f'{action} = {{ url = "{unit}/{action}" }}' for action in ("reset", "cycle")]
        path = config(tmp_path, board, "[power]", *hooks, "boot_s = 3")
        assert hil("board", "deploy", path).code == 0
        board.freeze()
        ended = hil("run", doubling, "--board", path)
    assert (ended.code, done) == (0, ["reset", "cycle"])
    assert "PASS" in ended.out
    assert "power cycle" in ended.err


@pytest.mark.board
@pytest.mark.slow
def test_run_reports_unrecoverable_board_as_unreachable(hil, make_board, tmp_path, doubling):
    board = make_board()
    board.kill()
    marks = tmp_path / "marks"
    hook = [sys.executable, "-c", f"open({str(marks)!r}, 'a').write('reset ')"]
    path = config(tmp_path, board, "[power]", f"reset = {json.dumps(hook)}", "boot_s = 1")
    ended = hil("run", doubling, "--board", path, "--json")
    assert (ended.code, ended.case["outcome"]) == (4, "BOARD_UNREACHABLE")
    assert marks.read_text() == "reset "
    assert "and a reset did not help" in ended.case["reason"]


@pytest.mark.board
@pytest.mark.parametrize("wrong", ["identity", "known_hosts", "address"])
def test_run_does_not_reset_board_after_refusal(hil, board_x86, tmp_path, doubling, wrong):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "identity"], check=True)
    (tmp_path / "known_hosts").touch()
    marks = tmp_path / "marks"
    path = config(tmp_path, board_x86, "[power]", f"reset = {json.dumps(['touch', str(marks)])}", "boot_s = 1")
    right = board_x86.address if wrong == "address" else str(getattr(board_x86, wrong))
    other = "root@nowhere.invalid" if wrong == "address" else str(tmp_path / wrong)
    path.write_text(path.read_text().replace(f'{wrong} = "{right}"', f'{wrong} = "{other}"'))
    ended = hil("run", doubling, "--board", path, "--json")
    outcome = "BOARD_UNREACHABLE" if wrong == "address" else "BOARD_REFUSED"
    assert (ended.code, ended.case["outcome"]) == (4, outcome)
    assert not marks.exists()


# ---- target CPU of programs


@pytest.mark.slow
@pytest.mark.board
def test_run_targets_arm_board_and_explains_newer_cpu_crash(hil, board_aarch64, tmp_path):
    known = valid(hil("board", "info", *at(board_aarch64), "--json"), "info")["info"]["machine"]
    assert known["arch"] == "aarch64"
    assert choose_iree_target(known).cpu == "cortex-a53"
    assert "avx2" not in known["cpu_features"]

    model = tmp_path / "f16.mlir"
    model.write_text(F16_MATMUL)
    given = ["--input", "32x32xf16=1", "--input", "32x32xf16=1", "--expected", "32x32xf16=32"]
    good = hil("run", model, "--board", *at(board_aarch64), *given, "--json")
    assert (good.code, good.case["outcome"]) == (0, "PASS")
    bad = hil(
        "run", model, "--board", *at(board_aarch64), "--compile-flag=--iree-llvmcpu-target-cpu=cortex-a76", "--json"
    )
    assert (bad.code, bad.case["outcome"]) == (3, "RUN_CRASH")
    assert "compiled for aarch64 cortex-a76, the board is aarch64 cortex-a53" in json.dumps(bad.case)


@pytest.mark.slow
def test_run_explains_load_error_of_other_cpu_architecture(hil, tmp_path):
    model = tmp_path / "f16.mlir"
    model.write_text(F16_MATMUL)
    arch, cpu = ("aarch64", "cortex-a72") if platform.machine() == "x86_64" else ("x86_64", "x86-64-v3")
    other = [f"--iree-llvmcpu-target-triple={arch}-unknown-linux-gnu", f"--iree-llvmcpu-target-cpu={cpu}"]
    ended = hil("run", model, *(f"--compile-flag={flag}" for flag in other), "--json")
    assert (ended.code, ended.case["outcome"]) == (3, "LOAD_ERROR")
    assert f"compiled for {arch} {cpu}, the board is" in json.dumps(ended.case)


@pytest.mark.slow
@pytest.mark.daily
def test_board_recover_runs_steps_until_board_works(hil, tmp_path):
    reset = tmp_path / "reset"
    path = tmp_path / "stuck.toml"
    path.write_text(f"""
[board]
runtime = "onnxruntime"
[simulator]
faults = ["wedge:reset={reset}"]
[recover]
steps = [{{ command = ["false"] }}, {{ command = ["touch", "{reset}"] }}]
""")
    found = hil("board", "check", path, "--json").document["checks"][-1]
    assert (found["name"], found["state"], "the device is stuck" in found["found"]) == ("program", "fail", True)
    ended = hil("board", "recover", path, "--json")
    assert (ended.code, ended.document["works"]) == (0, True), ended.err
    assert [bool(step["error"]) for step in ended.document["steps"]] == [True, False]
    again = hil("board", "recover", path, "--json").document
    assert again["works"] and again["steps"] == []


def test_board_recover_fails_without_recovery_steps(hil, tmp_path):
    path = tmp_path / "stuck.toml"
    path.write_text('[board]\nruntime = "onnxruntime"\n[simulator]\nfaults = ["wedge:how=hang"]\n')
    ended = hil("board", "recover", path, "--timeout", "2")
    assert ended.code == 4 and "does not work: run exceeded the limit of 2 s" in ended.out
    assert "missing [recover] steps and [power]" in ended.err
