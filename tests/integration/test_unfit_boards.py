"""Boards with failing disk or memory: real mounts in a namespace of the agent, and real memory limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.accidents import model_with_output
from support.agents import stop_process
from support.memory_groups import join_group, memory_group, memory_used
from support.models import DIGITS
from support.slow import slow_except

from hil.core.files import digest_file
from hil.errors import BoardUnfit

MIB = 1 << 20
DIGITS_CNN = DIGITS / "digits_cnn.onnx"
_CAN_MOUNT = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(_CAN_MOUNT.returncode != 0, reason="no mount namespaces here: they need root"),
]


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., SimpleNamespace]]:
    """Start an agent in a separate mount namespace. ``$STORE`` in a setup shell line is its store."""
    processes: list[subprocess.Popen[bytes]] = []

    def make(setup: str) -> SimpleNamespace:
        store = tmp_path / f"store-{len(processes)}"
        store.mkdir()
        agent = ["-m", "hil.agent", "--listen", f"unix:{tmp_path}/{len(processes)}.sock"]
        agent += ["--store", str(store), "--lifeline"]
        line = f'{setup} && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", line, "sh", sys.executable, *agent]
        environment = {**os.environ, "STORE": str(store)}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        processes.append(process)
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        inside = Path(f"/proc/{process.pid}/root{store}")

        def do(line: str) -> None:
            enter = ["nsenter", "-t", str(process.pid), "-m", "sh", "-c", line]
            subprocess.run(enter, check=True, env=environment)

        return SimpleNamespace(address=address, store=store, inside=inside, do=do, process=process)

    yield make
    for process in processes:
        stop_process(process)


def blob(folder: Path, number: int, size: int) -> tuple[str, Path]:
    path = folder / f"{number}.bin"
    path.write_bytes(bytes([number]) * size)
    return digest_file(path), path


def test_small_disk_evicts_programs_for_new_uploads(start, open_client, tmp_path):
    board = start("mount -t tmpfs -o size=24m none $STORE")
    for number in range(8):
        client = open_client(board.address)
        digest, path = blob(tmp_path, number, 6 * MIB)
        client.missing([digest])
        client.put({digest: (path, 0)})
        assert client.missing([digest]) == {}
        client.close()
    # hil cannot evict files of other programs.
    board.inside.joinpath("others").write_bytes(b"x" * 12 * MIB)
    client = open_client(board.address)
    digest, path = blob(tmp_path, 9, 16 * MIB)
    client.missing([digest])
    with pytest.raises(BoardUnfit, match=rf"this blob needs {16 * MIB} bytes, .* free in {board.store}") as caught:
        client.put({digest: (path, 0)})
    assert "remove files on the board" in caught.value.hint


def test_read_only_disk_gives_board_unfit(start, hil):
    board = start("mount -t tmpfs none $STORE")
    board.do("mount --bind $STORE $STORE && mount -o remount,bind,ro $STORE")
    ended = hil("run", DIGITS_CNN, "--board", board.address, "--runtime", "onnxruntime", "--json")
    case = ended.document["cases"][0]
    assert (ended.code, case["outcome"]) == (4, "BOARD_UNFIT"), case
    assert f"cannot use {board.store}" in case["reason"] and "the file system is read-only" in case["reason"]
    assert "dmesg" in case["error"]["hint"]


def test_upload_to_read_only_disk_gives_board_unfit(start, hil):
    board = start("mount -t tmpfs none $STORE")
    board.do("mount --bind $STORE/partial $STORE/partial && mount -o remount,bind,ro $STORE/partial")
    ended = hil("run", DIGITS_CNN, "--board", board.address, "--runtime", "onnxruntime", "--json")
    case = ended.document["cases"][0]
    assert (ended.code, case["outcome"], case["stage"]) == (4, "BOARD_UNFIT", "push"), case
    assert "the file system is read-only" in case["reason"]


def test_agent_without_writable_shared_memory_runs_programs(start, hil):
    board = start("mount -t tmpfs -o ro none /dev/shm")
    ended = hil("run", DIGITS_CNN, "--board", board.address, "--runtime", "onnxruntime", "--json")
    assert ended.document["cases"][0]["outcome"] == "PASS", ended.document["cases"][0]


@pytest.mark.parametrize(
    ("others_mib", "outcome", "code", "text"),
    slow_except(
        [
            (400, "BOARD_UNFIT", 4, "other processes use the rest of the board's"),
            (1, "RUN_CRASH", 3, "the program used"),
        ],
        0,
    ),
)
def test_out_of_memory_blames_the_program_or_the_board(start, hil, tmp_path, others_mib, outcome, code, text):
    with memory_group(600) as group, memory_used(group, others_mib):
        board = start(join_group(group))
        model = model_with_output(tmp_path, 320)
        ended = hil("run", model, "--board", board.address, "--runtime", "onnxruntime", "--json")
        case = ended.document["cases"][0]
        assert (case["outcome"], ended.code) == (outcome, code), case
        assert text in case["reason"], case["reason"]
        # The next program runs.
        again = hil("run", DIGITS_CNN, "--board", board.address, "--runtime", "onnxruntime", "--json")
        assert again.document["cases"][0]["outcome"] == "PASS"
        stop_process(board.process)
