"""Size expressions of exported PyTorch programs."""

from __future__ import annotations

import pytest

from hil.controller.models.importers.exported.pt2_sizes import check_size

PLAIN = [
    "s0",
    "2*s0 + 3*s1 - 1",
    "s0**2",
    "(s0 + 1)**2 // 4",
    "Max(1, s0 - 2)",
    "Mod(s27*s53, 16)",
    "FloorDiv(s0 + 7, 8)",
    "Symbol('s0', positive=True, integer=True)",
    "Add(Mul(Integer(16), Symbol('s0', integer=True)), Integer(-1))",
    "Pow(Symbol('s77', integer=True), Integer(3))",
    "PowByNatural(s0, 3)",
    "Pow(Symbol('s0', integer=True), Rational(1, 2))",
    "s0**0.5",
    "s0**(-1)",
    "s0**(1/2)",
    "FloatTrueDiv(s0, Float('1.5', precision=53))",
    "9223372036854775807",
    "-int_oo",
    "Eq(Mod(s0, 2), 0) & (s0 < 5)",
    "s0 << 3",
    "CeilToInt(IntTrueDiv(s0, 3))",
    " + ".join(f"s{number}" for number in range(200)),
]
HOSTILE = [
    "9**9**9",
    "2**100000",
    "((9**99)**99)**99",
    "Pow(9, Pow(9, 9))",
    "s0**s1",
    "PowByNatural(9, 999999999)",
    "1 << 999999999",
    "LShift(1, 999999999)",
    "1 << s0",
    "Float('1e999999999')",
    "Float('1', precision=999999999)",
    "(s0 + s1 + s2 + s3)**40",
    "*".join(["(s0 + s1)"] * 40),
    "Mul(" + ", ".join(["Add(s0, s1)"] * 40) + ")",
    "9" * 5000,
    "-" * 5000 + "1",
    "(" * 300 + "1" + ")" * 300,
    "+".join(["s0"] * 3000),
    "9**Integer(999)",
    "9**(99 + 9*9*9*9)",
    "1e300**99",
    "s0 + '",
    "__import__('os')",
    "s0.real",
    "(lambda: 1)()",
    "x" * 10_001,
]


@pytest.mark.parametrize("text", PLAIN)
def test_check_size_accepts_torch_expressions(text: str) -> None:
    check_size(text)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:30])
def test_check_size_rejects_code_and_unbounded_growth(text: str) -> None:
    with pytest.raises(ValueError):
        check_size(text)
