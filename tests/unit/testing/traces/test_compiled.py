"""A module compiled for one backend releases its board."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hil.errors import UsageError
from hil.testing.traces import compiled


@pytest.mark.parametrize("error", [None, UsageError("it exports no such method")])
def test_compiled_module_closes_runner_after_use_or_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: UsageError | None
) -> None:
    did: list[str] = []

    def begin() -> None:
        did.append("begin")
        if error is not None:
            raise error

    runner = SimpleNamespace(begin=begin, close=lambda: did.append("close"))
    subject: Any = SimpleNamespace(references=(), name="M", methods=("f",), make_runner=lambda *_: runner)
    monkeypatch.setattr(compiled, "make_subject", lambda *_: subject)
    if error is None:
        with compiled.compile(lambda: None, artifacts_dir=tmp_path) as module:
            module.reinitialize()
            assert did == ["begin", "begin"]
        assert did == ["begin", "begin", "close"]
    else:
        with pytest.raises(UsageError, match="no such method"):
            compiled.compile(lambda: None, artifacts_dir=tmp_path)
        assert did == ["begin", "close"]
