"""TensorFlow's StableHLO as text: read, and rid of what is no StableHLO."""

from __future__ import annotations

import re
from dataclasses import dataclass

# `%24 = mhlo.copy %23 : tensor<2xf32>` says that a result's buffer is not that of another one. It becomes what does
# nothing, in place: values of different regions have the same names, so that its uses cannot be found by name.
_COPY = re.compile(r"= mhlo\.copy (?P<value>%[\w#]+) : (?P<type>tensor<[^>]*>)")
_IDENTITY = r"= stablehlo.reshape \g<value> : (\g<type>) -> \g<type>"
# IREE knows chlo, StableHLO's companion, and not mhlo.
_ERF = re.compile(r"= mhlo\.erf (?P<value>%[\w#]+) : (?P<type>tensor<[^>]*>)")
_CHLO_ERF = r"= chlo.erf \g<value> : \g<type> -> \g<type>"
# `{alias = {..., parameter_number = 3 : i64}, output_index = array<i64: 3>}`
_ALIAS = re.compile(r"parameter_number = (?P<argument>\d+) : i64\}, output_index = array<i64(?:: (?P<result>\d+))?>")
_MAIN = re.compile(r"func\.func (?:public )?@main\((?P<arguments>.*?)\) -> ")


@dataclass(frozen=True)
class Text:
    """A module's text.

    Attributes:
        mlir: without operations of the dialect mhlo.
        arguments: how many ``main`` takes.
        aliases: number of a result -> number of the argument that it is the new value of.
    """

    mlir: str
    arguments: int
    aliases: dict[int, int]


def read(text: str) -> Text:
    """Read what ``experimental_get_compiler_ir(...)(stage="stablehlo")`` gave."""
    main = _MAIN.search(text)
    aliases = {int(found["result"] or 0): int(found["argument"]) for found in _ALIAS.finditer(text)}
    clean = _ERF.sub(_CHLO_ERF, _COPY.sub(_IDENTITY, text))
    return Text(clean, main["arguments"].count("%arg") if main else 0, aliases)
