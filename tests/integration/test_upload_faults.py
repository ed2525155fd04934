"""Interrupted uploads resume at the break."""

from __future__ import annotations

import numpy as np
import pytest

from hil import errors
from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import connect_board
from hil.core.boards import load_board
from hil.core.files import digest_file
from hil.core.results import Artifact

SIZE = 20_000_000


@pytest.fixture
def artifact(tmp_path):
    path = tmp_path / "large.bin"
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    return Artifact("iree", path.name, {path.name: path}, {path.name: digest_file(path)}, "", "none")


def board(*faults: str) -> Board:
    return connect_board(BoardChoice(load_board("sim").config, faults=faults))


def test_cut_upload_resumes_from_break(artifact):
    with board("drop:at=0.6,times=1") as connected:
        sent = connected.push(artifact)
        # The board has the full file. Only data in flight at the cut was sent twice.
        in_flight = 6_000_000
        assert SIZE <= sent <= SIZE + in_flight
        assert connected.push(artifact) == 0


def test_board_reports_bytes_of_cut_upload(start_agent, open_client, artifact):
    address = start_agent("--fault", "drop:at=0.6,times=1", module="hil.sim")
    digest, path = artifact.digests["large.bin"], artifact.files["large.bin"]
    with pytest.raises(errors.BoardError):
        open_client(address).put({digest: (path, 0)})
    client = open_client(address)
    have = client.missing([digest])[digest]
    assert have == int(SIZE * 0.6)
    client.put({digest: (path, have)})
    assert client.payload_bytes_sent == SIZE - have
    assert client.missing([digest]) == {}


def test_link_breaking_every_time_gives_board_lost(artifact):
    with board("drop:at=0.0,times=0") as connected, pytest.raises(errors.BoardError) as caught:
        connected.push(artifact)
    assert caught.value.outcome == "BOARD_LOST"


def test_program_lost_by_cut_upload_gives_board_lost(artifact, add_programs):
    add = add_programs["onnxruntime"]
    # Cut after the last byte, once for each upload.
    with board("drop:at=1.0,times=2") as connected:
        small = Artifact(add.runtime, add.path.name, {add.path.name: add.path}, add.digests, "", "none")
        connected.push(small)
        with connected.load(small) as program:
            connected.push(artifact)
            with pytest.raises(errors.BoardLost):
                program.run({"a": np.ones(4096, np.float32), "b": np.ones(4096, np.float32)})


@pytest.mark.slow
def test_slow_link_delays_upload(artifact):
    with board("slow:rate=10e6,delay=0.01") as connected:
        import time

        start = time.monotonic()
        assert connected.push(artifact) == SIZE
        assert time.monotonic() - start > SIZE / 10e6 * 0.8


def test_board_detects_damaged_partial_blob(start_agent, open_client, artifact, tmp_path):
    address = start_agent("--fault", "drop:at=0.5,times=1", module="hil.sim")
    digest, path = artifact.digests["large.bin"], artifact.files["large.bin"]
    with pytest.raises(errors.BoardError):
        open_client(address).put({digest: (path, 0)})
    (kept,) = (tmp_path / "store-0" / "partial").iterdir()
    with kept.open("r+b") as file:
        file.write(b"damaged!")
    client = open_client(address)
    have = client.missing([digest])[digest]
    with pytest.raises(errors.BlobDamaged, match="digest mismatch"):
        client.put({digest: (path, have)})
    assert client.missing([digest]) == {digest: 0}


def test_push_queries_board_only_after_new_upload(artifact, tmp_path):
    path = tmp_path / "small.bin"
    path.write_bytes(b"small")
    small = Artifact("iree", path.name, {path.name: path}, {path.name: digest_file(path)}, "", "none")
    with board() as connected:
        asked = []
        ask = connected.client.missing
        connected.client.missing = lambda digests: asked.append(digests) or ask(digests)
        sent = [connected.push(one) for one in (artifact, artifact, small, small, artifact, small, artifact)]
        assert sent == [SIZE, 0, 5, 0, 0, 0, 0]
        # The third upload might have made the board evict the first.
        assert len(asked) == 3
