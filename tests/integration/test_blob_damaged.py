"""Programs altered in the store of a running agent: hil sends them again or reports them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.agents import Program
from support.models import DIGITS
from support.over_grpc import metadata_of, stub_of

import hil as library
from hil import errors
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board import Board
from hil.controller.devices.choosing.board_factory import connect_board
from hil.controller.devices.choosing.board_resolver import choose
from hil.core.digest import digest_of
from hil.core.files import digest_file
from hil.core.results import Artifact, Outcome
from hil.protocol import wire
from hil.protocol.v1 import agent_pb2 as pb

A = np.ones(4096, np.float32)
MIB = 1 << 20


def alter(store: Path) -> None:
    """Overwrite the middle of every blob, as a program on the board can, and restore the modification time."""
    time.sleep(0.05)
    for blob in (store / "blobs").rglob("*"):
        if blob.is_file():
            before = blob.stat()
            blob.chmod(0o600)
            with blob.open("r+b") as file:
                file.seek(before.st_size // 2)
                file.write(b"\xff" * 64)

            os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))


def artifact_of(program: Program) -> Artifact:
    return Artifact(program.runtime, program.path.name, {program.path.name: program.path}, program.digests, "", "none")


@pytest.fixture
def board(start_agent: Callable[..., str]):
    said: list[str] = []
    with connect_board(replace(choose(start_agent()), say=said.append)) as connected:
        connected.take()
        connected.said = said
        yield connected


def test_push_resends_blob_altered_on_board(board: Board, add: Program, tmp_path: Path) -> None:
    artifact = artifact_of(add)
    for spoilt in (False, True, False, True):
        board.push(artifact)
        if spoilt:
            alter(tmp_path / "store-0")
        with board.load(artifact) as program:
            result, _ = program.run({"a": A, "b": A})
        np.testing.assert_array_equal(next(iter(result.outputs.values())), A + A)
    assert (
        len([line for line in board.said if "was modified on the board" in line and "uploading a new copy" in line])
        == 2
    )


def test_run_reports_repeatedly_altered_blob_as_blob_damaged(board: Board, tmp_path: Path) -> None:
    push = board.push

    def spoilt(*what: object) -> int:
        sent = push(*what)
        alter(tmp_path / "store-0")
        return sent

    board.push = spoilt
    case = library.run(DIGITS / "digits_cnn.onnx", board, runtime="onnxruntime")
    assert case.outcome is Outcome.BLOB_DAMAGED
    assert case.outcome.exit_code == errors.EXIT_BOARD
    assert "was modified on the board" in case.reason


def test_push_rejects_file_altered_on_host(board: Board, add: Program, tmp_path: Path) -> None:
    artifact = artifact_of(add)
    mine = tmp_path / add.path.name
    mine.write_bytes(add.path.read_bytes())
    changed = Artifact(add.runtime, mine.name, {mine.name: mine}, {mine.name: digest_file(mine)}, "", "none")
    mine.write_bytes(mine.read_bytes()[:-1] + b"\xff")
    with pytest.raises(errors.UsageError, match="changed after hil read it"):
        board.push(changed)
    board.push(artifact)


def cut_upload(client: AgentClient, number: int, size: int) -> None:
    """Send all but the last byte of a blob, then cancel."""

    def messages():
        yield pb.PutRequest(start=pb.PutStart(digest=digest_of(b"%d" % number), size=size + 1))
        for _ in range(size // MIB):
            yield from wire.split_pieces(memoryview(b"x" * MIB))

    with pytest.raises(errors.HilError), client._translate_errors():
        replies = stub_of(client).Put(messages(), metadata=metadata_of(client))
        list(replies)
        raise errors.BoardLost("broken off")


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_agent_quota_includes_interrupted_uploads(start_agent, open_client, tmp_path: Path) -> None:
    client = open_client(start_agent("--quota", str(20 * MIB)))
    most = 0
    for number in range(15):
        cut_upload(client, number, 10 * MIB)
        most = max(most, size_of(tmp_path / "store-0"))
    assert 9 * MIB < most <= 21 * MIB
    whole = tmp_path / "whole"
    whole.write_bytes(b"w" * (15 * MIB))
    name = digest_file(whole)
    client.put({name: (whole, 0)})
    assert client.missing([name]) == {}
    assert size_of(tmp_path / "store-0") <= 21 * MIB
