"""A farm's terms: what its file may say, and what it may not."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from hil.controller.farm.settings import FarmSettings, load_settings
from hil.errors import UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "farm.toml"


@pytest.mark.parametrize("text", [None, "", "[terms]", "[other]\nlease_s = 1"])
def test_without_terms_they_are_as_usual(path: Path, text: str | None):
    if text is not None:
        path.write_text(text)
    assert load_settings(path) == FarmSettings()


def test_the_file_sets_some_and_the_others_are_as_usual(path: Path):
    path.write_text("[terms]\nlease_s = 3\naging_s = 0.5\n")
    settings = load_settings(path)
    assert (settings.lease_s, settings.aging_s) == (3.0, 0.5)
    assert all(
        getattr(settings, one.name) == getattr(FarmSettings(), one.name)
        for one in fields(FarmSettings)
        if one.name not in ("lease_s", "aging_s")
    )


def test_every_term_can_be_set(path: Path):
    given = {one.name: float(number) for number, one in enumerate(fields(FarmSettings), 2)} | {"beat_s": 1.0}
    path.write_text("[terms]\n" + "".join(f"{name} = {value}\n" for name, value in given.items()))
    assert load_settings(path) == FarmSettings(**given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[terms]\nleese_s = 1", r"\[terms\] has no 'leese_s'"),
        ("[terms]\nlease_s = 0", "lease_s must be a number above 0"),
        ("[terms]\nlease_s = 1", "beat_s is 1.5: whoever beats so rarely is lost after 1"),
        ("[terms]\nbeat_s = 6", "lost after 6"),
        ("[terms]\nlease_s = -1", "lease_s must be a number above 0"),
        ("[terms]\nlease_s = nan", "lease_s must be a number above 0"),
        ("[terms]\nlease_s = inf", "lease_s must be a number above 0"),
        ("[terms]\nlease_s = true", "lease_s must be a number above 0"),
        ("[terms]\nlease_s = '6'", "lease_s must be a number above 0"),
        ("terms = 3", r"\[terms\] has no ''"),
        ("[terms", "cannot be read"),
    ],
)
def test_terms_that_make_no_sense_are_refused(path: Path, text: str, said: str):
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        load_settings(path)


def test_a_file_that_cannot_be_read_is_said(path: Path):
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        load_settings(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        load_settings(path)


def test_a_worker_is_heard_of_several_times_before_it_is_given_up():
    usual = FarmSettings()
    assert min(usual.lease_s, usual.owner_s, usual.holder_s) >= 3 * usual.beat_s
