"""A conversion without its framework: the hint names the runtime that needs no conversion."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.models import conversions
from hil.core.install_hints import make_install_command
from hil.core.results import Model
from hil.errors import UsageError


def require_missing(package: str, extra: str) -> str:
    raise UsageError(f"requires {package}, which is not installed", hint=make_install_command(extra))


@pytest.mark.parametrize(
    ("source", "target", "hint"),
    [
        ("tflite", "onnx", "; or use --runtime tflite (in a suite: --flow tflite), which needs no conversion"),
        ("keras", "onnx", ""),
    ],
)
def test_hint_names_runtime_of_format(source, target, hint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "require_version", require_missing)
    path = tmp_path / f"m.{source}"
    model = Model(name="m", path=path, format=source, digest="blake3:0", files={path.name: path})
    with pytest.raises(UsageError) as caught:
        conversions.convert(model, target, work={})  # type: ignore[typeddict-item]
    assert caught.value.hint == f"{make_install_command('tensorflow')}{hint}"
    assert caught.value.option == ("--runtime" if hint else "")
