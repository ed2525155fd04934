"""Files that hold tensors, of people whom nobody knows."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from hil.controller.tensor_files import load_npz
from hil.errors import UsageError


def test_an_archive_that_unpacks_to_more_than_the_memory_is_not_unpacked(tmp_path: Path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(5000):
            archive.writestr(f"{number}.npy", b"")
        for member in archive.infolist():
            member.file_size = (1 << 32) - 2
    with pytest.raises(UsageError, match="more than this machine's memory holds"):
        load_npz(path)
