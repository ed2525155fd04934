"""Digests of files that change during the read, and digests computed in a thread."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.core import digest, files
from hil.core.digest import SMALL, OrderedExecutor, StreamHasher, digest_of

# Truncates and extends a file in an endless loop.
CUT = """
import os, sys
file = os.open(sys.argv[1], os.O_RDWR)
while True:
    os.ftruncate(file, 0)
    os.ftruncate(file, 64 << 20)
"""
READ = """
import sys, time
from pathlib import Path
from hil.core import files
end = time.monotonic() + 3
while time.monotonic() < end:
    files.digest_file(Path(sys.argv[1]))
"""


@pytest.mark.ci
def test_digest_file_survives_concurrent_truncation(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    with subprocess.Popen([sys.executable, "-c", CUT, str(file)]) as cutting:
        try:
            reading = subprocess.run([sys.executable, "-c", READ, str(file)], timeout=60)
        finally:
            cutting.kill()
    assert reading.returncode == 0


def test_digest_file_of_growing_file_covers_initial_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    opened = files.open_file

    def grown(path: Path):
        file = opened(path)
        size = os.fstat(file.fileno()).st_size
        monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((0,) * 6 + (size,) + (0,) * 3))
        path.write_bytes(b"x" * 1000)
        return file

    monkeypatch.setattr(files, "open_file", grown)
    assert files.digest_file(file, "sha256") == f"sha256:{hashlib.sha256(b'x' * 100).hexdigest()}"


@pytest.mark.parametrize("size", [0, 1, (4 << 20) - 1, 9 << 20])
def test_digest_file_matches_digest_of_bytes(tmp_path: Path, size: int):
    (tmp_path / "file").write_bytes(os.urandom(size))
    for algorithm in digest.ALGORITHMS:
        whole = digest.digest_of((tmp_path / "file").read_bytes(), algorithm)
        assert files.digest_file(tmp_path / "file", algorithm) == whole


LARGE = bytes(SMALL + 1)


@given(st.lists(st.sampled_from([b"", b"a", bytes(1000), LARGE, LARGE[:-1]]), max_size=20))
def test_stream_hasher_matches_digest_of_pieces(pieces):
    hasher = StreamHasher()
    for piece in pieces:
        hasher.update(piece)
    assert hasher.digest() == digest_of(b"".join(pieces))


def test_ordered_executor_runs_all_work_in_order():
    done: list[int] = []
    executor = OrderedExecutor()
    for number in range(50):
        executor.do(lambda data: done.append(len(data)), LARGE[: len(LARGE) - number] if number % 3 else b"x" * number)
    executor.finish()
    assert done == [len(LARGE) - number if number % 3 else number for number in range(50)]


def test_small_piece_buffer_may_be_reused_immediately():
    """Even after large pieces, as in a resumed upload."""
    hasher, executor, room, written = StreamHasher(), OrderedExecutor(), bytearray(SMALL), bytearray()
    for value in range(20):
        for work in (hasher.update, lambda data: executor.do(written.extend, data)):
            work(LARGE)
        room[:] = bytes([value]) * SMALL
        hasher.update(room)
        executor.do(written.extend, room)
        room[:] = bytes(SMALL)
    executor.finish()
    expected = b"".join(LARGE + bytes([value]) * SMALL for value in range(20))
    assert written == expected
    assert hasher.digest() == digest_of(expected)


def test_ordered_executor_blocks_caller_at_queue_limit():
    gate = threading.Event()
    executor = OrderedExecutor()
    done: list[int] = []

    def work(data: bytes) -> None:
        gate.wait(60)
        done.append(len(data))

    for _ in range(8):
        executor.do(work, LARGE)
    assert not done
    threading.Timer(0.3, gate.set).start()
    executor.do(lambda data: None, LARGE)
    assert gate.is_set()
    executor.finish()


def test_ordered_executor_raises_error_of_work():
    def fail(data: bytes) -> None:
        raise OSError("full")

    executor = OrderedExecutor()
    executor.do(fail, LARGE)
    with pytest.raises(OSError, match="full"):
        executor.finish()
