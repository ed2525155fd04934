from __future__ import annotations

import subprocess
import sys

import pytest

from hil.core import installation


@pytest.mark.parametrize("version", [(3, 10), sys.version_info])
def test_a_module_is_run_with_its_arguments_and_nothing_of_the_working_directory(version, tmp_path, monkeypatch):
    monkeypatch.setattr(installation.sys, "version_info", version)
    command = installation.module_command("json.tool", "--no-ensure-ascii", "in put.json")
    monkeypatch.undo()
    for name in ("runpy", "json", "argparse"):
        (tmp_path / f"{name}.py").write_text("open('it ran', 'w')")
    (tmp_path / "in put.json").write_text('{"a": "²"}')
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "²" in done.stdout
    assert not (tmp_path / "it ran").exists()
