"""Only regular files are read, up to a limit; writes are atomic."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hil.core.files import (
    FileReader,
    copy_file,
    load_file,
    map_file,
    open_file,
    read_end,
    read_file,
    read_text,
    replace_file,
    resolve_within,
    write_atomic,
)
from hil.errors import UnreadableFile, UsageError


def test_write_atomic_replaces_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "first\r\n")
    with path.open("rb") as before:
        write_atomic(path, b"second")
        assert before.read() == b"first\r\n"
    assert path.read_bytes() == b"second"
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_write_atomic_escapes_lone_surrogates(tmp_path: Path) -> None:
    write_atomic(tmp_path / "report", "naïve \udc80")
    assert (tmp_path / "report").read_text() == "naïve \\udc80"


def test_write_atomic_accepts_longest_file_name(tmp_path: Path) -> None:
    write_atomic(tmp_path / ("日" * 85), "x")
    assert (tmp_path / ("日" * 85)).read_text() == "x"


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_write_atomic_applies_mode_before_rename(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (seen.append(self.stat().st_mode), replace(self, to)))
    write_atomic(tmp_path / "token", "secret", mode=mode)
    modes = [stat.S_IMODE(one) for one in (*seen, (tmp_path / "token").stat().st_mode)]
    umask = os.umask(0)
    os.umask(umask)
    assert modes == [mode & ~umask] * 2


def test_replacing_failure_retains_old_file(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replace_file(path) as temporary:
        temporary.write_text("half of")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "gone" / "x", "x")
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path, "x")


def test_write_atomic_writes_through_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def make_odd(folder: Path, kind: str) -> Path:
    """Return a path that is not a regular file."""
    path = folder / kind
    if kind == "named pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


@pytest.mark.parametrize("kind", ["named pipe", "socket", "device", "folder"])
@pytest.mark.parametrize(
    "read", [open_file, read_file, read_text, read_end, map_file, load_file, lambda path: copy_file(path, path)]
)
def test_file_readers_reject_special_files(tmp_path: Path, kind: str, read) -> None:
    path = make_odd(tmp_path, kind)
    with pytest.raises(UnreadableFile, match=f"is a {kind}, not a regular file") as caught:
        read(path)
    # Callers that handle a missing file also handle this error: an OSError with a reason.
    assert isinstance(caught.value, OSError) and isinstance(caught.value, UsageError)
    assert caught.value.strerror == f"it is a {kind}, not a regular file"


def test_open_file_exposes_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with open_file(tmp_path / "file") as file:
        assert Path(file.name) == tmp_path / "file"


@pytest.mark.parametrize("name", ["zero\0byte", "half \ud800 pair"])
def test_file_readers_reject_invalid_names(tmp_path: Path, name: str) -> None:
    for read in (read_file, lambda path: resolve_within(tmp_path, path)):
        with pytest.raises(UnreadableFile, match="invalid file name"):
            read(tmp_path / name)


def test_file_readers_enforce_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 40)
    for read in (read_file, read_text):
        with pytest.raises(UnreadableFile, match="has 1099511627776 bytes"):
            read(path)
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(UnreadableFile, match="has 5 bytes, at most 4 are allowed"):
        read_file(path, 4)


def test_read_file_allocates_actual_size(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"few bytes")
    assert read_file(tmp_path / "small", most=1 << 62) == b"few bytes"


def test_read_file_limits_files_of_unknown_size() -> None:
    # Kernel files report a size of 0 bytes.
    with pytest.raises(UnreadableFile, match="2 are allowed"):
        read_file(Path("/proc/self/status"), 2)


def test_read_end_returns_last_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100 + b"end\xff")
    assert read_end(path, 4) == "end\N{REPLACEMENT CHARACTER}"
    assert len(read_end(path)) == 104


def test_map_file_accepts_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert len(map_file(path)) == 0
    path.write_bytes(b"abc")
    assert bytes(map_file(path)) == b"abc"


def test_load_file_checks_size(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    assert bytes(load_file(path)) == b"abc"
    with pytest.raises(UnreadableFile, match="has 3 bytes, at most 2 are allowed"):
        load_file(path, 2)


def test_file_reader_rejects_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * (1 << 16))
    with FileReader(path) as reader:
        assert bytes(reader.read(10, 3)) == b"xxx"
        os.truncate(path, 1 << 15)
        with pytest.raises(UnreadableFile, match="was truncated while hil read it"):
            reader.read(0, 1 << 16)
        with pytest.raises(UnreadableFile, match="was truncated while hil read it"):
            reader.read(0, 1 << 40)
