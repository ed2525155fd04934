from __future__ import annotations

import pytest

from hil.controller.analysis.profile.locations import names_in


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ('loc("fc1")', ["fc1"]),
        ('loc(fused["conv1", "relu1", "conv1"])', ["conv1", "relu1"]),
        ('loc("layer"("model.mlir":3:5))', ["layer"]),
        ('loc("model.mlir":12:3)', ["line 12"]),
        ('loc(fused["a.mlir":2:3, "a.mlir":4:7])', ["line 2", "line 4"]),
        ('loc(callsite("inner" at "outer"))', ["inner", "outer"]),
        (r'loc("say \22hi\22 \\ there")', ['say "hi" \\ there']),
        (r'loc("\E7\95\B3\E3\81\BF")', ["畳み"]),
        ("loc(unknown)", []),
    ],
)
def test_names_in_locations(location: str, expected: list[str]) -> None:
    assert names_in(location) == expected
