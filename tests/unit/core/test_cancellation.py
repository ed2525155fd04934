"""Cancelled work stops at its next check."""

from __future__ import annotations

import threading
from contextvars import copy_context
from pathlib import Path

import numpy as np
import pytest

from hil.core.cancellation import WorkCancelled, cancel_on, check_cancelled, hold_lock, is_cancelled
from hil.core.file_tensor import FileTensor, OpenFile
from hil.core.files import digest_file, open_file


@pytest.fixture
def cancelled() -> threading.Event:
    flag = threading.Event()
    flag.set()
    return flag


def test_check_cancelled_passes_outside_context(cancelled: threading.Event) -> None:
    check_cancelled()
    with cancel_on(cancelled):
        assert is_cancelled()
        with pytest.raises(WorkCancelled):
            check_cancelled()
    assert not is_cancelled()


def test_cancellation_flag_propagates_to_thread(cancelled: threading.Event) -> None:
    seen: list[bool] = []
    with cancel_on(cancelled):
        context = copy_context()
    thread = threading.Thread(target=context.run, args=[lambda: seen.append(is_cancelled())])
    thread.start()
    thread.join()
    assert seen == [True] and not is_cancelled()


def test_work_cancelled_bypasses_except_exception() -> None:
    assert not issubclass(WorkCancelled, Exception)


def test_lock_wait_raises_work_cancelled(cancelled: threading.Event) -> None:
    for lock in (threading.Lock(), threading.BoundedSemaphore(1)):
        with lock, cancel_on(cancelled), pytest.raises(WorkCancelled), hold_lock(lock):
            pass
        with cancel_on(cancelled), hold_lock(lock):  # a free lock needs no wait
            pass


def test_file_reads_raise_work_cancelled(tmp_path: Path, cancelled: threading.Event) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    with open_file(tmp_path / "x") as file:
        tensor = FileTensor(OpenFile(file, tmp_path / "x"), np.dtype(np.int8), (100,), (1,), 0)
    with cancel_on(cancelled):
        with pytest.raises(WorkCancelled):
            np.asarray(tensor)
        with pytest.raises(WorkCancelled):
            digest_file(tmp_path / "x")
