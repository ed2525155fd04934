"""Installed packages match importlib.metadata."""

from __future__ import annotations

import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from hil.core import installed

INFO = "Metadata-Version: 2.1\nName: {}\nVersion: {}\nSummary: none\n\nVersion: 9.9\n"


def a_package(place: Path, folder: str, name: str, version: str, points: str = "") -> None:
    (place / folder).mkdir(parents=True)
    (place / folder / "METADATA").write_text(INFO.format(name, version))
    (place / folder / "entry_points.txt").write_text(points)


def test_installed_versions_and_points_match_importlib():
    names = sorted({one.metadata["Name"] for one in metadata.distributions()})
    assert len(names) > 20
    for name in names:
        assert installed.get_version(name) == metadata.version(name)
    for group in metadata.entry_points().groups | {"hil.runtimes", "no.such"}:
        assert list(installed.list_entry_points(group)) == list(metadata.entry_points(group=group))


def test_installed_version_normalizes_names(tmp_path, monkeypatch):
    a_package(tmp_path, "some_thing-1.2.dist-info", "some.thing", "1.2")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed.get_version("Some-Thing") == installed.get_version("some.thing") == "1.2"
    with pytest.raises(metadata.PackageNotFoundError):
        installed.get_version("some")


def test_installed_finds_source_of_package(tmp_path, monkeypatch):
    for name in ("from_index", "from_file"):
        a_package(tmp_path, f"{name}-1.0.dist-info", name, "1.0")
    (tmp_path / "from_file-1.0.dist-info/direct_url.json").write_text('{"url": "file:///x.whl"}')
    monkeypatch.syspath_prepend(tmp_path)
    assert [installed.is_from_index(name) for name in ("from_index", "from_file", "no_such")] == [True, False, False]


def test_installed_uses_first_of_duplicate_packages(tmp_path, monkeypatch):
    for version in ("1.0", "2.0"):
        place = tmp_path / version
        a_package(place, f"twice-{version}.dist-info", "twice", version, f"[twice]\nit = m:v{version[0]}\n")
        monkeypatch.syspath_prepend(place)
    assert installed.get_version("twice") == "2.0"
    assert [point.value for point in installed.list_entry_points("twice")] == ["m:v2"]


def test_installed_searches_given_folders_first(tmp_path):
    a_package(tmp_path, "pytest-0.1.dist-info", "pytest", "0.1")
    assert installed.get_version("pytest", [str(tmp_path)]) == "0.1" != installed.get_version("pytest")


def test_installed_finds_packages_in_zip_archive(tmp_path, monkeypatch):
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("packed-3.0.dist-info/METADATA", INFO.format("packed", "3.0"))
        made.writestr("packed-3.0.dist-info/entry_points.txt", "[packed]\nit = m:v\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(archive)])
    assert installed.get_version("packed") == "3.0"
    assert [point.value for point in installed.list_entry_points("packed")] == ["m:v"]
