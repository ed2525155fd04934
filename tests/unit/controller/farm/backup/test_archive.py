"""Test that archives are complete, and that hostile archives are refused."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from hil.controller.farm.backup.archive import (
    DATABASE,
    MANIFEST,
    ArchiveWriter,
    DigestDiffers,
    iter_entries,
    name_home,
    name_stored,
    verify_archive,
)
from hil.controller.records.lab.farm_backup import BackupManifest
from hil.core.digest import digest_of
from hil.core.files import open_file
from hil.errors import UsageError

FILE = b"weights" * 1000
MADE = BackupManifest(
    format=1,
    hil="1.0",
    created="2026-11-30T12:00:00+00:00",
    postgres=180000,
    migrations={},
    jobs=1,
    boards=1,
    tokens=1,
    files=1,
    bytes=len(FILE),
    dump=digest_of(b"dump"),
    content="",
)
LONG = PurePosixPath("history", "programs", f"blake3-{'a' * 64}", "files", f"{'b' * 150}.vmfb")


def write(path: Path, manifest: BackupManifest = MADE) -> Path:
    with path.open("wb") as file:
        writer = ArchiveWriter(file)
        writer.add(DATABASE, 4, [b"du", b"mp"])
        writer.add(name_stored(digest_of(FILE)), len(FILE), [FILE], digest_of(FILE))
        writer.add(name_home(LONG), 2, [b"ok"])
        writer.finish(manifest)
    return path


def tar(path: Path, *entries: tuple[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size, info.type = len(content) if kind == tarfile.REGTYPE else 0, kind
            info.linkname = "/etc/passwd" if kind != tarfile.REGTYPE else ""
            archive.addfile(info, io.BytesIO(content))
    return path


def test_archive_keeps_all_entries(tmp_path: Path) -> None:
    path = write(tmp_path / "farm.tar")
    assert verify_archive(path).jobs == 1
    with open_file(path) as file:
        found = {entry.name: b"".join(entry.pieces) for entry in iter_entries(file, path) if entry.name != MANIFEST}
    assert found == {DATABASE: b"dump", name_stored(digest_of(FILE)): FILE, name_home(LONG): b"ok"}


def test_archive_is_readable_with_tar(tmp_path: Path) -> None:
    with tarfile.open(write(tmp_path / "farm.tar")) as archive:
        assert archive.getnames() == [DATABASE, name_stored(digest_of(FILE)), name_home(LONG), MANIFEST]


@pytest.mark.parametrize("pieces", [[b"too long"], [b"ab"], [b"abcx"]], ids=["long", "short", "other"])
def test_writer_drops_entry_with_wrong_content(tmp_path: Path, pieces: list[bytes]) -> None:
    with (tmp_path / "farm.tar").open("wb") as file:
        writer = ArchiveWriter(file)
        with pytest.raises(DigestDiffers):
            writer.add(name_stored(digest_of(b"abcd")), 4, pieces, digest_of(b"abcd"))
        writer.add(DATABASE, 4, [b"dump"])
        writer.finish(MADE)
    assert verify_archive(tmp_path / "farm.tar").dump == MADE.dump


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: flip(data, 512), id="dump"),
        pytest.param(lambda data: flip(data, 1536), id="stored file"),
        pytest.param(lambda data: data[:-1100], id="truncated manifest"),
        pytest.param(lambda data: data[:3000], id="truncated file"),
        pytest.param(lambda data: data[1024:], id="missing entry"),
        pytest.param(lambda data: data + b"x", id="appended"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: b"no tar" * 1000, id="text"),
    ],
)
def test_verify_rejects_damaged_archive(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = write(tmp_path / "farm.tar")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match="not a complete backup"):
        verify_archive(path)


@pytest.mark.parametrize("size", [600, 1100, 2000, 3000])
def test_verify_names_truncation(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "farm.tar")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UsageError, match="the file is truncated"):
        verify_archive(path)


def test_verify_names_truncation_of_large_entry(tmp_path: Path) -> None:
    path = tar(tmp_path / "farm.tar", (DATABASE, bytes(100_000)))
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(UsageError, match="the file is truncated"):
        verify_archive(path)


@pytest.mark.parametrize(
    "name", ["../x", "home/../../x", "/etc/passwd", "home//etc/passwd", "home/", "store/blake3/ab/x", "home/a\n"]
)
def test_verify_rejects_names_outside_farm(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="invalid entry"):
        verify_archive(tar(tmp_path / "farm.tar", (name, b"x")))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_verify_rejects_links_and_devices(tmp_path: Path, kind: bytes) -> None:
    with pytest.raises(UsageError, match="not a regular file"):
        verify_archive(tar(tmp_path / "farm.tar", ("home/farm.toml", b""), kind=kind))


def test_verify_rejects_duplicate_entries(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="duplicate entry"):
        verify_archive(tar(tmp_path / "farm.tar", (DATABASE, b"a"), (DATABASE, b"b")))


@pytest.mark.parametrize("size", [1 << 40, (1 << 62)])
def test_verify_rejects_size_beyond_file(tmp_path: Path, size: int) -> None:
    info = tarfile.TarInfo(MANIFEST)
    info.size = size
    (tmp_path / "farm.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(UsageError, match="not a complete backup"):
        verify_archive(tmp_path / "farm.tar")


def test_verify_rejects_newer_format(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has format 2"):
        verify_archive(write(tmp_path / "farm.tar", MADE.replace(format=2)))
