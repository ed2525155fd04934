"""What a ``.bpte`` has within itself: tests/frameworks/executorch has those that ExecuTorch wrote."""

from __future__ import annotations

import pytest

from hil.controller.suite.bundled import bundled
from hil.errors import UsageError


def test_a_damaged_file_says_so(tmp_path):
    file = tmp_path / "net.bpte"
    file.write_bytes(b"\0\0\0\0BP08" + b"\xff" * 40)
    with pytest.raises(UsageError, match=r"net\.bpte cannot be read"):
        bundled(file, outputs=False)


def test_a_program_without_cases_has_none(tmp_path):
    file = tmp_path / "net.bpte"
    file.write_bytes(b"\x10\0\0\0ET12" + b"\0" * 40)
    assert bundled(file, outputs=True) == {}
