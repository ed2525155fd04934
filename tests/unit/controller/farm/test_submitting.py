"""What the words of `hil farm submit` are."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.farm.messages import Kind
from hil.controller.farm.submitting import kind_of
from hil.errors import UsageError


def test_a_word_that_names_nothing_is_told_with_what_could_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert kind_of(["@models"]) is Kind.SUITE
    with pytest.raises(UsageError, match="there is no suite, model, bundle or folder 'models'") as caught:
        kind_of(["models"])
    assert "did you mean '@models'? @operators, @models, or" in caught.value.hint
    (tmp_path / "models").mkdir()
    assert kind_of(["models"]) is Kind.SUITE


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.onnx", Kind.RUN), ("a.hilb", Kind.BUNDLE), ("a.bpte", Kind.SUITE), ("call_0.flagfile", Kind.SUITE)],
)
def test_a_file_that_brings_cases_is_a_suite_of_them(tmp_path: Path, name: str, kind: Kind) -> None:
    (tmp_path / name).write_text("")
    assert kind_of([str(tmp_path / name)]) is kind
