"""Define the arithmetics that a board may declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hil.errors import UsageError, did_you_mean

FLOAT32 = "float32"
INT8 = "int8"
# Levels from -127 to 127. The range is symmetric, so that a value and its negative round alike.
INT8_LEVELS = 127


@dataclass(frozen=True)
class Arithmetic:
    """Parameters of a float arithmetic.

    int8 has no such parameters: its step size depends on each tensor's largest value.
    """

    digits: int  # significand bits, including the implicit bit
    smallest: float  # smallest subnormal
    largest: float

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value."""
        return float(2.0 ** (1 - self.digits))


FLOATS: Mapping[str, Arithmetic] = MappingProxyType(
    {
        "float16": Arithmetic(11, 2.0**-24, 65504.0),
        "bfloat16": Arithmetic(8, 2.0**-133, (2.0 - 2.0**-7) * 2.0**127),
    }
)
# Flag of hil for IREE: hil writes the arithmetic into ONNX models before IREE compiles them.
ARITHMETIC_FLAG = "--arithmetic="
# Flags of IREE that round the inputs of matrix products in MLIR models.
_DEMOTE = "--iree-global-opt-demote-contraction-inputs-"
_DEMOTED_TYPES = {"float16": "f16", "bfloat16": "bf16"}
# Arithmetics that a config may declare. float32 is the default: the board computes like the reference.
ARITHMETICS = (FLOAT32, *FLOATS, INT8)


def is_arithmetic_flag(flag: str) -> bool:
    """Return whether a flag for IREE sets only the arithmetic, not the target."""
    return flag.startswith((ARITHMETIC_FLAG, _DEMOTE))


def add_arithmetic_flags(flags: Sequence[str], arithmetic: str) -> tuple[str, ...]:
    """Return the flags for IREE on a simulated board, with the flags for its arithmetic unless they set one."""
    if arithmetic in ("", FLOAT32) or any(map(is_arithmetic_flag, flags)):
        return tuple(flags)
    demoted = _DEMOTED_TYPES.get(arithmetic)
    more = (f"{_DEMOTE}type={demoted}", f"{_DEMOTE}operations=all") if demoted else ()
    return (*flags, f"{ARITHMETIC_FLAG}{arithmetic}", *more)


def check_arithmetic(name: str, where: str) -> str:
    """Return the name, which may be "" for undeclared. Raises UsageError for unknown arithmetics."""
    if name and name not in ARITHMETICS:
        raise UsageError(
            f"{where}: unknown arithmetic {name!r}",
            hint=f"{did_you_mean(name, ARITHMETICS)}expected one of {', '.join(ARITHMETICS)}",
        )
    return name
