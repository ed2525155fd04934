"""Test that digests of hil's code change with the matched files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.storage.sources import own_code
from hil.controller.storage.sources.own_code import ONNX_REWRITING, digest_code


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models").mkdir()
    for name in ("models/onnx_a.py", "models/onnx_b.py", "models/other.py"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(own_code, "_HIL", tmp_path)
    return tmp_path


def digest() -> str:
    digest_code.cache_clear()
    return digest_code("models/onnx_*.py")


def test_code_digest_changes_with_matching_files(package: Path):
    first = digest()
    (package / "models/other.py").write_text("changed")
    assert digest() == first
    (package / "models/onnx_b.py").write_text("changed")
    assert digest() != first


def test_code_digest_rejects_pattern_without_match(package: Path):
    with pytest.raises(ValueError, match=r"matches 'models/gone\.py'"):
        digest_code("models/gone.py")


def test_rewriting_patterns_match_files():
    digest_code.cache_clear()
    assert digest_code(*ONNX_REWRITING).startswith("blake3:")
