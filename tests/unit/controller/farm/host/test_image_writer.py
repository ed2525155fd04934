"""Test the directory of an image on the board's host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.farm.host import image_writer
from hil.controller.farm.host.image_writer import ImageWriter
from hil.controller.farm.host.inventory import HostInfo
from hil.core.boards import load_board
from hil.errors import ProvisionFailed, UsageError
from hil.protocol.v1 import farm_pb2 as pb


class Farm:
    """Farm client that is not used."""

    def __init__(self, *_: object, **settings: object) -> None:
        pass

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a board's directory. The farm's store has one image."""
    cache = SimpleNamespace(fetch=lambda digest, target, client: target.write_text(digest))
    monkeypatch.setattr(image_writer, "FileCache", lambda folder: cache)
    monkeypatch.setattr(image_writer, "FarmClient", Farm)
    return tmp_path / "board"


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, file: str = "card.img", error: str = "") -> list[Any]:
    """Write an image. Return the files during the command, and the reports of its end."""
    found: list[Any] = []

    def write_file(self: ImageWriter, choice: object, image: Path) -> None:
        found.extend(sorted((one.name, one.read_text()) for one in image.parent.iterdir()))
        if error:
            raise ProvisionFailed(error)

    monkeypatch.setattr(ImageWriter, "_write_file", write_file)
    site = HostInfo("host", "lab", "unix:gateway", folder.parent, folder.parent)  # type: ignore[arg-type]
    writer = ImageWriter(site, folder, lambda: load_board("sim").config, print, lambda: found.append("end"))
    writer.write(pb.SwitchPower(file=file, image="sha256:1"))
    return found


def test_image_of_a_killed_worker_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "image").mkdir(parents=True)
    (folder / "image" / "old.img").write_text("large")
    assert write(folder, monkeypatch) == [("card.img", "sha256:1"), "end"]
    assert list(folder.iterdir()) == []


def test_failed_image_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProvisionFailed):
        write(folder, monkeypatch, error="the command failed")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("file", ["../card.img", "a/b", "", ".."])
def test_image_stays_in_its_directory(file: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="invalid name of an image"):
        write(folder, monkeypatch, file=file)
