"""What errors of other people's code say, in a line."""

from __future__ import annotations

import pytest

from hil.controller.storage.texts import first_line, import_hint
from hil.controller.workloads.suites.torch_cases import find_tests


@pytest.mark.parametrize(
    ("text", "line"), [("", "ValueError"), (" \n\n", "ValueError"), ("\n  why \n more", "why"), ("x" * 11, "x" * 10)]
)
def test_the_first_line_that_says_something_is_told(text: str, line: str) -> None:
    assert first_line(ValueError(text), most=10) == line


def test_a_library_beside_a_torch_that_it_was_not_built_for_is_told_with_a_way_out(tmp_path, monkeypatch) -> None:
    package = tmp_path / "made_tests"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "test_vision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (package / "test_absent.py").write_text("import a_package_that_is_not_there.at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    absent, vision = find_tests("made_tests", quantize=False)
    assert "nms does not exist; the torchvision here was built for another torch" in vision["problem"]
    assert "index of CPU builds" in vision["problem"]
    assert absent["problem"].endswith("pip install a_package_that_is_not_there")
    assert import_hint(RuntimeError("something else")) == ""
