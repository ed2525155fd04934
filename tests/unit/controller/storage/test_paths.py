from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.storage.paths import is_file, path_exists


@pytest.mark.parametrize(
    "text", ["", "no-such", "x" * 5000, "a\0b", "file/below", "file/", "loop", "folder", "file", "."]
)
def test_path_checks_accept_any_text(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    Path("loop").symlink_to("loop")
    assert path_exists(text) == (text in ("folder", "file", "."))
    assert is_file(text) == (text == "file")
