"""Files of pinned host keys for paramiko."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hil.controller.devices.ssh.paramiko.hosts import KnownHosts
from hil.core.files import MAX_TEXT_BYTES
from hil.errors import UsageError


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "large"])
def test_known_hosts_rejects_irregular_files(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    with pytest.raises(UsageError, match="cannot read the known hosts in"):
        KnownHosts([tmp_path / name], accept_new=False, board="b")


@pytest.mark.parametrize("name", ["/dev/null", "absent"])
def test_known_hosts_reads_empty_files(tmp_path: Path, name: str) -> None:
    assert KnownHosts([tmp_path / name], accept_new=False, board="b").list_preferred_kinds("pi") == []
