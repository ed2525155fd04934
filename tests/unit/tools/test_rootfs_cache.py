"""The cache of root file systems: built once, whole or not at all."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from hil.errors import UsageError
from tools.virtual_board.rootfs import cached, root_filesystem


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_two_at_once_build_once() -> None:
    built: list[Path] = []
    found: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        time.sleep(0.2)
        (folder / "file").write_text("whole")

    threads = [threading.Thread(target=lambda: found.append(cached("thing", "recipe", build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(found) == 4 and len(set(found)) == 1
    assert (found[0] / "file").read_text() == "whole"


def test_another_recipe_is_another_folder() -> None:
    assert cached("thing", "one", lambda _: None) != cached("thing", "two", lambda _: None)


def test_what_failed_is_built_anew() -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        cached("thing", "recipe", fail)
    assert list(cached("thing", "recipe", lambda folder: (folder / "file").touch()).iterdir()) != []
    assert not (cached("thing", "recipe", fail) / "half").exists()


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(UsageError, match="riscv64"):
        root_filesystem("riscv64")
