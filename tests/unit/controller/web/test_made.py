"""Test the size limit of page data in the user's cache."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hil.controller.storage.cache import Cache
from hil.controller.web.files import made
from hil.controller.web.graph import graphs
from hil.controller.web.index.profiles import StoredProfile
from hil.controller.web.pages.traces import perfetto
from hil.errors import StorageError


def fill(cache: Cache, kind: str, number: int) -> str:
    key = cache.key(kind, number=number)
    cache.put(key, {}, lambda folder: (folder / "x").write_bytes(bytes(10_000)) and None)
    time.sleep(0.01)  # entries need different times of use
    return key


def test_check_room_evicts_oldest_page_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "MAX_BYTES", 35_000)
    cache = Cache(tmp_path)
    program = fill(cache, "artifact", 0)
    keys = [fill(cache, kind, number) for number in range(3) for kind in made.KINDS]
    made.check_room(cache)
    assert {entry.key for entry in cache.ls()} == {program, *keys[-3:]}


def test_check_room_rejects_new_entries_on_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    program, _ = fill(cache, "artifact", 0), fill(cache, "graph", 0)
    monkeypatch.setattr(made, "has_room", lambda place, more: False)
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path))
    with pytest.raises(StorageError, match="disk is full"):
        made.check_room(cache)
    assert [entry.key for entry in cache.ls()] == [program]
    with pytest.raises(StorageError, match="disk is full"):
        graphs.read_graph("hil.formats.nothing:call", "blake3:x", path="x")
    (tmp_path / "run").mkdir()
    for name in perfetto.HEAD, perfetto.TABLE:
        (tmp_path / "run" / name).write_text("{}")
    monkeypatch.setattr(perfetto, "open_profile", lambda roots, one: one)
    one = StoredProfile("run", tmp_path / "run", "0/run")
    with pytest.raises(StorageError, match="disk is full"):
        perfetto.make_comparison([tmp_path], one, one)
