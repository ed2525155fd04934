"""Commands in hints that install an extra."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from hil.core.install_hints import make_install_command


def test_wheel_installs_the_extra_by_name(tmp_path: Path) -> None:
    assert make_install_command("mcu", tmp_path) == "pip install 'hil[mcu]'"


def test_checkout_installs_the_extra_from_its_directory(tmp_path: Path) -> None:
    root = tmp_path / "my hil"
    root.mkdir()
    (root / "pyproject.toml").touch()
    words = shlex.split(make_install_command("mcu", root))
    assert words == [sys.executable, *"-m pip install -c".split(), f"{root}/constraints.txt", "-e", f"{root}[mcu]"]
