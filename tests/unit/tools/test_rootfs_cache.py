"""The cache of root file systems: built once and atomically."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from hil.errors import UsageError
from tools.virtual_board.rootfs import get_cached, get_root_filesystem


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_rootfs_cache_shares_build_of_concurrent_calls() -> None:
    built: list[Path] = []
    found: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        time.sleep(0.2)
        (folder / "file").write_text("whole")

    threads = [threading.Thread(target=lambda: found.append(get_cached("thing", "recipe", build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(found) == 4 and len(set(found)) == 1
    assert (found[0] / "file").read_text() == "whole"


def test_rootfs_cache_separates_recipes() -> None:
    assert get_cached("thing", "one", lambda _: None) != get_cached("thing", "two", lambda _: None)


def test_rootfs_cache_rebuilds_after_failure() -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        get_cached("thing", "recipe", fail)
    assert list(get_cached("thing", "recipe", lambda folder: (folder / "file").touch()).iterdir()) != []
    assert not (get_cached("thing", "recipe", fail) / "half").exists()


def test_rootfs_rejects_unknown_architecture() -> None:
    with pytest.raises(UsageError, match="riscv64"):
        get_root_filesystem("riscv64")
