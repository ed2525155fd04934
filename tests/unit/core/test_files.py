"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hil.core.files import replacing, write_atomic


def test_a_file_is_written_in_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "first\r\n")
    with path.open("rb") as before:
        write_atomic(path, b"second")
        assert before.read() == b"first\r\n"
    assert path.read_bytes() == b"second"
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_half_a_surrogate_pair_is_no_reason_to_have_no_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "report", "naïve \udc80")
    assert (tmp_path / "report").read_text() == "naïve \\udc80"


def test_a_name_may_be_as_long_as_a_file_system_allows(tmp_path: Path) -> None:
    write_atomic(tmp_path / ("日" * 85), "x")
    assert (tmp_path / ("日" * 85)).read_text() == "x"


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_nobody_may_read_more_than_the_mode_says(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (seen.append(self.stat().st_mode), replace(self, to)))
    write_atomic(tmp_path / "token", "secret", mode=mode)
    modes = [stat.S_IMODE(one) for one in (*seen, (tmp_path / "token").stat().st_mode)]
    umask = os.umask(0)
    os.umask(umask)
    assert modes == [mode & ~umask] * 2


def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_text("half of")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "gone" / "x", "x")
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path, "x")


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
