from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hil.agent.removal import remove_tree


def test_a_tree_goes_whatever_is_in_it(tmp_path: Path, monkeypatch):
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    kept.mkdir()
    (kept / "file").write_text("mine")
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "file").write_text("x")
    (folder / "a" / "b" / "link").symlink_to(kept)
    (folder / "link").symlink_to(kept / "file")
    (folder / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "a" / "fifo")
    (folder / "a" / "b").chmod(0)
    monkeypatch.chdir(folder / "a")
    for _ in range(2000):
        Path("d").mkdir()
        os.chdir("d")
    monkeypatch.undo()
    try:
        remove_tree(folder)
        assert not folder.exists()
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # pytest itself cannot remove what is so deep
    assert (kept / "file").read_text() == "mine"


def test_a_folder_that_is_not_there_is_none(tmp_path: Path):
    remove_tree(tmp_path / "none")
