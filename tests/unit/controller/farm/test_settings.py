"""Test the settings of a farm: valid and invalid files."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from hil.controller.farm.local.farm_history import find_farm_history
from hil.controller.farm.settings import FarmSettings, UserLimits, load_history, load_settings
from hil.controller.pipeline.settings.history_settings import HistorySettings
from hil.controller.storage.history.place import HistoryPlace
from hil.errors import UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "farm.toml"


@pytest.mark.parametrize("text", [None, "", "[terms]", "[limits]"])
def test_settings_default_without_terms(path: Path, text: str | None):
    if text is not None:
        path.write_text(text)
    assert load_settings(path) == FarmSettings()


def test_settings_override_only_given_terms(path: Path):
    path.write_text("[terms]\nlease_s = 3\naging_s = 0.5\n")
    settings = load_settings(path)
    assert (settings.lease_s, settings.aging_s) == (3.0, 0.5)
    assert all(
        getattr(settings, one.name) == getattr(FarmSettings(), one.name)
        for one in fields(FarmSettings)
        if one.name not in ("lease_s", "aging_s")
    )


def test_settings_accept_every_term(path: Path):
    terms = [one.name for one in fields(FarmSettings) if one.name != "limits"]
    given = {name: float(number) for number, name in enumerate(terms, 2)} | {"beat_s": 1.0}
    path.write_text("[terms]\n" + "".join(f"{name} = {value}\n" for name, value in given.items()))
    assert load_settings(path) == FarmSettings(**given)


def test_settings_read_limits_of_users(path: Path):
    path.write_text("[limits]\nboards = 2\nlease_hours = 1.5\n[limits.users.anna]\nboards = 8\n")
    limits = load_settings(path).limits
    assert limits.get_limits("bert") == UserLimits(boards=2, lease_hours=1.5)
    assert limits.get_limits("anna") == UserLimits(boards=8, lease_hours=1.5)
    assert FarmSettings().limits.get_limits("bert") == UserLimits()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits]\nboard = 1", r"unknown limit 'board' in \[limits\]"),
        ("[limits]\nboards = 0", "boards must be a whole number above 0"),
        pytest.param(f"[limits]\nboards = {10**400}", "boards must be at most", id="huge"),
        ("[limits]\nboards = 1.5", "boards must be a whole number above 0"),
        ("[limits]\nqueued = true", "queued must be a whole number above 0"),
        ("[limits]\nlease_hours = 'x'", "lease_hours must be a number above 0"),
        ("[limits.users.anna]\nqueued = -1", r"\[limits.users.anna\] queued must be"),
        ("[limits.users]\nanna = 3", r"unknown limit '' in \[limits.users.anna\]"),
        ("limits = 3", "must be tables"),
        ("[limits]\nusers = 3", "must be tables"),
        ("[terms]\nlimits = 3", "unknown setting 'limits'"),
        ("[terms]\nleese_s = 1", r"unknown setting 'leese_s' in \[terms\]"),
        ("[terms]\nlease_s = 0", "lease_s must be a number above 0"),
        ("[terms]\nlease_s = 1", r"beat_s must be below lease_s \(1\), got 1.5"),
        ("[terms]\nbeat_s = 6", r"beat_s must be below lease_s \(6\)"),
        ("[terms]\nlease_s = -1", "lease_s must be a number above 0"),
        ("[terms]\nlease_s = nan", "lease_s must be a number above 0"),
        ("[terms]\nlease_s = inf", "lease_s must be a number above 0"),
        ("[terms]\nlease_s = true", "lease_s must be a number above 0"),
        ("[terms]\nlease_s = '6'", "lease_s must be a number above 0"),
        ("terms = 3", r"unknown setting '' in \[terms\]"),
        ("[terms", "cannot be read"),
    ],
)
def test_settings_reject_invalid_terms(path: Path, text: str, said: str):
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        load_settings(path)


def test_settings_report_unreadable_file(path: Path):
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        load_settings(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        load_settings(path)


def test_default_timeouts_allow_missed_beats():
    usual = FarmSettings()
    assert min(usual.lease_s, usual.owner_s, usual.holder_s) >= 3 * usual.beat_s


def test_history_is_in_the_farms_database_and_home(path: Path, tmp_path: Path):
    url = "postgresql://lab/farm"
    assert load_history(path, url) is None
    path.write_text('[history]\nquota = "3 MiB"')
    assert load_history(path, url) is None
    path.write_text('[history]\nauto = true\nquota = "3 MiB"')
    assert load_history(path, url) == HistorySettings(HistoryPlace(tmp_path / "history", url), 3 << 20, True)
    path.write_text('[history]\nauto = true\npath = "kept"')
    assert load_history(path, url) == HistorySettings(HistoryPlace(tmp_path / "kept"), auto=True)
    path.write_text("[history]\nenabled = true")
    with pytest.raises(UsageError, match=r"unknown key 'enabled' in \[history\]"):
        load_history(path, url)


def test_local_history_uses_embedded_or_given_database(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HIL_FARM_HOME", str(tmp_path))
    monkeypatch.delenv("HIL_FARM_DB", raising=False)
    with pytest.raises(UsageError, match="has no history"):
        find_farm_history()
    path.write_text("[history]\nauto = true")
    assert find_farm_history().place.url.startswith("postgresql://postgres@/postgres?host=")
    monkeypatch.setenv("HIL_FARM_DB", "postgresql://lab/farm")
    assert find_farm_history().place == HistoryPlace(tmp_path / "history", "postgresql://lab/farm")
