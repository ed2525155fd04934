"""The arithmetics that a board may compute in: the only place that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hil.errors import UsageError, did_you_mean

FLOAT32 = "float32"
INT8 = "int8"
# Symmetric: -127 to 127, so that a value and its negative round alike.
INT8_LEVELS = 127


@dataclass(frozen=True)
class Arithmetic:
    """A float arithmetic. int8 has no such numbers: its steps follow each tensor's largest value."""

    digits: int  # bits of a significand, the implicit one included
    smallest: float  # the smallest subnormal
    largest: float

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger value."""
        return float(2.0 ** (1 - self.digits))


FLOATS: Mapping[str, Arithmetic] = MappingProxyType(
    {
        "float16": Arithmetic(11, 2.0**-24, 65504.0),
        "bfloat16": Arithmetic(8, 2.0**-133, (2.0 - 2.0**-7) * 2.0**127),
    }
)
# What may be declared. float32 is the default: the board computes as the reference does.
ARITHMETICS = (FLOAT32, *FLOATS, INT8)


def check_arithmetic(name: str, where: str) -> str:
    """Return the name; "" is none. Raises UsageError: hil knows no such arithmetic."""
    if name and name not in ARITHMETICS:
        raise UsageError(
            f"{where}: unknown arithmetic {name!r}",
            hint=f"{did_you_mean(name, ARITHMETICS)}one of {', '.join(ARITHMETICS)}",
        )
    return name
