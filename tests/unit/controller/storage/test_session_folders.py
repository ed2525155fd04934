"""Search for stored runs and suite runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.storage.session_folders import find_session_folder
from hil.errors import UsageError

RECORDS = ("run.json", "suite.json")


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    for name in ("runs/20261130-01-a/run.json", "suites/20261130-02-b/suite.json", "suites/notes/readme.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    return [tmp_path / "runs", tmp_path / "suites", tmp_path / "missing"]


@pytest.mark.parametrize(
    ("name", "found"), [("20261130-01", 0), ("20261130-01-a", 0), ("20261130-02-b", 1), ("latest", 1)]
)
def test_session_is_found_in_all_directories(roots: list[Path], name: str, found: int) -> None:
    assert find_session_folder(name, roots, RECORDS).parent == roots[found]


def test_session_is_found_by_path(roots: list[Path]) -> None:
    folder = roots[1] / "20261130-02-b"
    assert find_session_folder(str(folder), [], RECORDS) == folder


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "\udc80", "nothing", ""])
def test_session_name_without_match_is_rejected(roots: list[Path], name: str) -> None:
    with pytest.raises(UsageError, match=r"session .* not found"):
        find_session_folder(name, roots, RECORDS)


def test_session_name_with_several_matches_is_rejected(roots: list[Path]) -> None:
    with pytest.raises(UsageError, match=r"ambiguous session '2026': .*-a, .*-b"):
        find_session_folder("2026", roots, RECORDS)


def test_directory_without_record_is_rejected(roots: list[Path]) -> None:
    with pytest.raises(UsageError, match="notes is a directory, but not a run") as caught:
        find_session_folder(str(roots[1] / "notes"), roots, RECORDS, "run")
    assert "run.json or suite.json" in caught.value.hint
