"""What the words of `hil farm submit` are."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.farm.messages import Kind
from hil.controller.farm.submitting import kind_of
from hil.errors import UsageError


def test_a_word_that_names_nothing_is_told_with_what_could_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert kind_of(["models"]) is Kind.SUITE
    with pytest.raises(UsageError, match="no such file: modls") as caught:
        kind_of(["modls"])
    assert "operators, models" in caught.value.hint
