"""`hil run` on boards with SSH only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.boards_checks import listening, world_readable
from support.models import DIGITS

from tools.virtual_board import VirtualBoard

pytestmark = pytest.mark.board

DIGITS_CNN = DIGITS / "digits_cnn.onnx"
SSHD_ONLY = {("tcp", "0.0.0.0", 22), ("tcp", "::", 22)}


def to(board: VirtualBoard, user: str = "root") -> list[object]:
    return ["--board", f"{user}@{board.ip}", "--identity", board.identity, "--known-hosts", board.known_hosts]


@pytest.mark.parametrize(
    "arch", [pytest.param("x86_64", marks=pytest.mark.daily), pytest.param("aarch64", marks=pytest.mark.slow)]
)
def test_first_run_deploys_agent_for_later_runs(hil, make_board, arch):
    board = make_board(name="new", arch=arch)
    first = hil("run", DIGITS_CNN, *to(board), "--json")
    assert first.code == 0, first.err
    assert "pushing" in first.err
    assert re.search(rf"compiling for {arch} \S+", first.err)
    case = first.case
    assert case["outcome"] == "PASS"
    assert case["verdicts"][0]["outputs"][0]["mismatches"] == 0
    assert case["device"]["p50_ns"] > 0
    provenance = case["provenance"]
    assert provenance["machine"]["arch"] == arch
    assert provenance["machine"]["kernel"] and provenance["machine"]["cpu_model"]
    assert provenance["host_key"].startswith("SHA256:")
    assert provenance["agent_version"] and provenance["runtime_version"]
    second = hil("run", DIGITS_CNN, *to(board), "--json")
    assert second.code == 0, second.err
    assert "pushing" not in second.err and "starting" not in second.err
    assert second.case["pushed_bytes"] == 0
    assert second.case["provenance"]["board_id"] == provenance["board_id"]


@pytest.mark.parametrize("arch", ["x86", pytest.param("aarch64", marks=pytest.mark.slow)])
def test_agent_leaves_ports_closed_and_files_private(hil, request, arch):
    board = request.getfixturevalue(f"board_{arch}")
    assert hil("run", DIGITS_CNN, *to(board)).code == 0
    assert board.run(["pgrep", "-f", "hil.agent"]).stdout, "the agent is there"
    assert listening(board) == SSHD_ONLY
    folders = ["/root/.hil", "/tmp", "/dev/shm", "/run", "/home"]
    assert world_readable(board, folders) == []
    # Nor if the parent directories were readable.
    assert world_readable(board, ["/root/.hil"], reachable=False) == []


@pytest.mark.slow
def test_agent_serves_both_runtimes(hil, board_x86):
    for runtime in ("iree", "onnxruntime", "iree"):
        ended = hil("run", DIGITS_CNN, *to(board_x86), "--runtime", runtime, "--json")
        assert ended.code == 0, ended.err
        assert ended.case["artifact"]["runtime"] == runtime
    assert "pushing" not in ended.err


@pytest.mark.slow
def test_run_works_for_unprivileged_user(hil, board_x86):
    ended = hil("run", DIGITS_CNN, *to(board_x86, "tester"), "--json")
    assert ended.code == 0, ended.err
    assert board_x86.run(["ls", "-A", "/home/tester"]).stdout.split() == [".hil", ".ssh"]


@pytest.mark.slow
def test_run_reads_password_from_environment(hil, environment, board_x86):
    environment["HIL_SSH_PASSWORD"] = "tester"
    environment["SSH_AUTH_SOCK"] = ""
    where = ["--board", f"tester@{board_x86.ip}", "--known-hosts", board_x86.known_hosts]
    ended = hil("run", DIGITS_CNN, *where, "--json")
    assert ended.code == 0, ended.err
    environment["HIL_SSH_PASSWORD"] = "wrong"
    ended = hil("run", DIGITS_CNN, *where, "--json")
    assert ended.code == 4
    assert "wrong" not in ended.out + ended.err


def test_run_shares_board_between_models(hil, board_x86):
    models = [DIGITS / f"{name}.onnx" for name in ("digits_cnn", "digits_cnn_int8")]
    ended = hil("run", *models, *to(board_x86), "--json")
    assert ended.code == 0, ended.err
    assert [case["outcome"] for case in ended.document["cases"]] == ["PASS", "PASS"]


def test_python_api_connects_by_ssh_address(environment, board_x86, tmp_path):
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh" / "config").write_text(
        f"Host kitchen\n  HostName {board_x86.ip}\n  User root\n  IdentityFile {board_x86.identity}\n"
        f"  UserKnownHostsFile {board_x86.known_hosts}\n"
    )
    program = f"""
import hil
with hil.connect("ssh:kitchen") as board:
    for _ in range(2):
        case = hil.run({str(DIGITS_CNN)!r}, board)
        assert case, case.reason
assert case.pushed_bytes == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_run_reports_unreachable_board(hil, board_x86, tmp_path: Path):
    ended = hil("run", DIGITS_CNN, "--board", "root@10.231.255.1", "--json")
    assert ended.code == 4
    assert ended.case["outcome"] == "BOARD_UNREACHABLE"
    assert ended.case["error"]["hint"]
