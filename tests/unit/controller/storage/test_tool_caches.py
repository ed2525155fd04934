from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hil.controller.storage.tool_caches import make_tool_environment, set_matplotlib_directory

VARIABLES = ("KERAS_HOME", "MPLCONFIGDIR", "ZIG_GLOBAL_CACHE_DIR")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_tool_environment_points_to_cache(home: Path) -> None:
    found = make_tool_environment()
    assert sorted(found) == sorted(VARIABLES)
    assert {Path(path).parent for path in found.values()} == {home / "cache"}


def test_tool_environment_uses_absolute_paths(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("HIL_CACHE_DIR", "cache")
    assert make_tool_environment()["KERAS_HOME"] == str(home / "cache" / "keras")


def test_tool_environment_omits_variables_set_by_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", "/mine")
    assert "MPLCONFIGDIR" not in make_tool_environment()
    with set_matplotlib_directory():
        assert os.environ["MPLCONFIGDIR"] == "/mine"
    assert os.environ["MPLCONFIGDIR"] == "/mine"


def test_tool_environment_respects_keras_settings_of_user(home: Path) -> None:
    (home / ".keras").mkdir()
    (home / ".keras" / "keras.json").write_text("{}")
    assert "KERAS_HOME" not in make_tool_environment()


def test_matplotlib_directory_applies_only_in_context(home: Path) -> None:
    with set_matplotlib_directory():
        assert os.environ["MPLCONFIGDIR"] == str(home / "cache" / "matplotlib")
    assert "MPLCONFIGDIR" not in os.environ


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0"), ("", "")])
def test_hil_import_disables_telemetry_unless_set(given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    if given is not None:
        environment["ORT_DISABLE_TELEMETRY"] = given
    code = "import hil, os; print(repr(os.environ['ORT_DISABLE_TELEMETRY']))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(expected)
