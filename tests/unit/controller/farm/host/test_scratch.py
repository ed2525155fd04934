"""Test that a worker's temporary files are deleted by it or by its board's next worker."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hil.controller.farm.host.inventory import BoardEntry, HostInfo
from hil.controller.farm.host.worker import redirect_scratch
from hil.controller.farm.paths import FarmAddress


def test_scratch_folder_isolates_and_deletes_temporary_files(tmp_path: Path) -> None:
    site = HostInfo("h", "s", FarmAddress(("unix:x",), "t"), tmp_path, tmp_path / "sockets")
    post = BoardEntry("board", tmp_path / "board.toml", tmp_path / "board")
    before = tempfile.gettempdir(), os.environ.get("TMPDIR")
    with redirect_scratch(post, site):
        left = Path(tempfile.mkdtemp())
        assert left.is_relative_to(site.sockets) and os.environ["TMPDIR"] == str(left.parent)
        with redirect_scratch(BoardEntry("other", post.config, post.folder), site):
            assert left.exists() and not Path(tempfile.gettempdir()).samefile(left.parent)
        # Simulate the successor of a killed worker.
        with redirect_scratch(post, site):
            assert not left.exists()
    assert list(site.sockets.iterdir()) == []
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == before
