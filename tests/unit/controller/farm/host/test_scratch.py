"""A worker's temporary files are gone with it, or with the next worker of its board."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hil.controller.farm.host.inventory import BoardEntry, HostInfo
from hil.controller.farm.host.worker import scratch_folder
from hil.controller.farm.paths import FarmAddress


def test_temporary_files_are_in_a_folder_of_the_boards_own_and_go_with_it(tmp_path: Path) -> None:
    site = HostInfo("h", "s", FarmAddress(("unix:x",), "t"), tmp_path, tmp_path / "sockets")
    post = BoardEntry("board", tmp_path / "board.toml", tmp_path / "board")
    before = tempfile.gettempdir(), os.environ.get("TMPDIR")
    with scratch_folder(post, site):
        left = Path(tempfile.mkdtemp())
        assert left.is_relative_to(site.sockets) and os.environ["TMPDIR"] == str(left.parent)
        with scratch_folder(BoardEntry("other", post.config, post.folder), site):
            assert left.exists() and not Path(tempfile.gettempdir()).samefile(left.parent)
        # As the worker that follows one which was killed.
        with scratch_folder(post, site):
            assert not left.exists()
    assert list(site.sockets.iterdir()) == []
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == before
