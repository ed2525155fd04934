"""Test `hil cache ls`: readable names and a limited number of lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hil.controller.cli.stored.cache import cache
from hil.controller.storage.cache import Cache


def lines(*words: str) -> list[str]:
    return CliRunner().invoke(cache, ["ls", *words], standalone_mode=False, catch_exceptions=False).stdout.splitlines()


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path))
    held = Cache()

    def fill(folder: Path) -> None:
        (folder / "file").write_bytes(b"x" * 1000)

    held.put(Cache.key("tool", of="board"), {"package": "iree-base-runtime", "version": "3.13.0"}, fill)
    for number in range(30):
        meta = {"model": f"net{number}", "compiler": "iree 3.13.0", "flags": ["--of", "many"]}
        held.put(Cache.key("artifact", number=number), meta, fill)


def test_cache_ls_lists_last_twenty_entries_and_totals(filled):
    short, every = lines(), lines("--all")
    assert short[20] == "... 11 entries more: hil cache ls --all"
    assert len(every) == len(short) - 1 + 11
    assert [line.split()[:3] for line in short[21:23]] == [["artifact", "30", "entries,"], ["tool", "1", "entry,"]]
    assert short[-1].startswith("31 entries, ")


def test_cache_ls_names_entries_by_model_or_package(filled):
    told = "\n".join(lines("--all"))
    assert "  net7  iree 3.13.0" in told and "--of" not in told
    assert "  iree-base-runtime, 3.13.0" in told
