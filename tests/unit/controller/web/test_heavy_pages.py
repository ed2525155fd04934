"""Test that readers of large tensors do not delay other pages."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from support.waiting import eventually
from support.web import serving
from support.web_pages import routes
from support.web_tensors import write_tensors

from hil.controller.web.access.connections import MAX_WORKING
from hil.controller.web.access.heavy import HEAVY, MAX_HEAVY_OF_CLIENT
from hil.controller.web.tensors.view import TensorView

SECONDS = 60


def read(address: str) -> bytes:
    with urlopen(address, timeout=SECONDS) as answer:
        found: bytes = answer.read()
        return found


@pytest.mark.parametrize("start", ["", "/api/v1"])
def test_waiting_tensor_pages_do_not_delay_other_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    values = np.arange(4, dtype=np.float32)
    write_tensors(tmp_path, {"y": values}, {"y": values})
    release, waiting = threading.Event(), threading.Semaphore(0)
    judge = TensorView.judgement

    def wait(view: TensorView) -> object:
        waiting.release()
        assert release.wait(2 * SECONDS)
        return judge(view)

    monkeypatch.setattr(TensorView, "judgement", wait)
    readers = 2 * MAX_WORKING
    with serving(tmp_path) as server, ThreadPoolExecutor(readers) as pool:
        try:
            tensors = [
                pool.submit(read, f"{server}{start}/tensors?id=run&case=model&rtol=1e-{number}")
                for number in range(1, readers + 1)
            ]
            for _ in range(MAX_HEAVY_OF_CLIENT):
                assert waiting.acquire(timeout=SECONDS)
            # All threads for tensors wait now.
            for page in ("/session?id=run", "/", "/api/v1/session?id=run"):
                assert read(f"{server}{page}")
            assert not any(one.done() for one in tensors)
        finally:
            release.set()
        eventually(lambda: all(one.done() for one in tensors))
        assert all(b"y" in one.result() for one in tensors)


def test_pages_of_tensors_are_heavy() -> None:
    # The next failing output is found in the index, without reading a tensor.
    assert {one for one in routes() if "tensors" in one} == {*HEAVY, "/tensors/failing"}
