from __future__ import annotations

import pytest

from hil.core import own_version
from hil.errors import BoardRefused, VersionMismatch
from hil.protocol import versions, wire


def test_check_agent_accepts_same_protocol_of_any_release() -> None:
    versions.check_agent(wire.PROTOCOL, "9.9", "rpi5")


@pytest.mark.parametrize("protocol", [0, wire.PROTOCOL + 1])
def test_check_agent_reports_both_versions(protocol: int) -> None:
    with pytest.raises(VersionMismatch) as error:
        versions.check_agent(protocol, "9.9", "rpi5")
    text = error.value.message
    assert f"hil 9.9 (agent protocol {protocol})" in text
    assert f"hil {own_version()} (agent protocol {wire.PROTOCOL})" in text
    assert (error.value.board, error.value.outcome) == ("rpi5", "BOARD_REFUSED")


def test_check_agent_limits_length_of_reported_release() -> None:
    with pytest.raises(VersionMismatch) as error:
        versions.check_agent(7, "9" * 10_000, "rpi5")
    assert len(error.value.message) < 300


def test_check_farm_caller_accepts_current_metadata() -> None:
    key, value = versions.make_farm_metadata()
    assert key == versions.FARM_KEY
    versions.check_farm_caller(value)


def test_check_farm_caller_takes_missing_version_as_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "FARM_PROTOCOL", 1)
    versions.check_farm_caller("")
    monkeypatch.setattr(versions, "FARM_PROTOCOL", 2)
    with pytest.raises(VersionMismatch, match=r"hil unknown \(farm protocol 1\)"):
        versions.check_farm_caller("")


def test_check_farm_caller_reports_both_versions() -> None:
    with pytest.raises(VersionMismatch) as error:
        versions.check_farm_caller("7 9.9")
    text = error.value.message
    assert "hil 9.9 (farm protocol 7)" in text
    assert f"hil {own_version()} (farm protocol {versions.FARM_PROTOCOL})" in text
    assert isinstance(error.value, BoardRefused)


@pytest.mark.parametrize("value", ["x", "1", "-1 9.9", "1 a b", "1 \x1b[2J", "1" * 500 + " 9.9", "1 " + "9" * 500])
def test_check_farm_caller_rejects_malformed_version(value: str) -> None:
    with pytest.raises(VersionMismatch) as error:
        versions.check_farm_caller(value)
    assert len(error.value.message) < 300
    assert "\x1b" not in error.value.message
