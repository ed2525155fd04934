"""Where profiles may go is settled before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.analysis.profile.asked import check_folder
from hil.errors import UsageError


def test_a_folder_is_made(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "out", "run")
    assert (tmp_path / "new" / "out").is_dir()


@pytest.mark.parametrize(("kind", "held"), [("run", "profile.json"), ("run", "raw"), ("compile", "passes.csv")])
def test_an_older_profile_of_the_kind_may_be_replaced(tmp_path: Path, kind: str, held: str) -> None:
    (tmp_path / held).touch()
    check_folder(tmp_path, kind)


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("run", ["model.onnx"]),
        ("run", ["passes.csv"]),
        ("compile", ["ops.csv"]),
        ("compile", ["passes.csv", "ops.csv"]),
    ],
)
def test_a_folder_with_other_things_is_left_alone(tmp_path: Path, kind: str, held: list[str]) -> None:
    for name in held:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="holds other things"):
        check_folder(tmp_path, kind)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be a profile's folder"):
        check_folder(tmp_path / "file" / "below", "run")
