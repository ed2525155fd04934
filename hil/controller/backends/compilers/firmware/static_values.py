"""Read values of a program that are known before it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hil.errors import CompileFailed


class UnknownValue:
    """Value that is not known before the run."""

    def __init__(self, origin: str) -> None:
        self.origin = origin


def make_static_error(name: str, why: str) -> CompileFailed:
    """Return the error for an operation that a static schedule cannot have."""
    return CompileFailed(
        f"the program has no static schedule: operation {name} {why}",
        hint="firmware has no allocator and no scheduler: give every dimension a fixed size, and remove operations "
        "whose shape or control flow depends on values",
    )


def need_numbers(name: str, values: Sequence[Any]) -> list[int]:
    """Return the values of an operation. Raise CompileFailed if one is not known before the run."""
    for value in values:
        if not isinstance(value, int):
            raise make_static_error(name, "depends on a value that is only known while the program runs")
    return list(values)


def read_constant(attribute: Any) -> Any:
    """Return the integer of an attribute, or an :class:`UnknownValue`."""
    text = str(attribute)
    if text in ("true", "false"):
        return int(text == "true")
    match = re.match(r"(-?\d+)(?: : (?:index|i\d+))?$", text)
    return int(match[1]) if match else UnknownValue(text[:40])


def read_bytes(attribute: Any) -> bytes:
    """Return the bytes of a constant: a dense attribute, or a composite of multiple."""
    from iree.compiler import ir

    text = str(attribute)
    if not text.startswith("#util.composite<"):
        return _read_dense(attribute)
    start, end = text.index("[") + 1, text.rindex("]")
    # The parts are `dense<...> : type`, separated by commas. A comma inside of brackets separates values.
    parts, depth, begin, quoted = [], 0, start, False
    for place in range(start, end):
        character = text[place]
        if character == '"':
            quoted = not quoted
        elif not quoted and character in "<[(":
            depth += 1
        elif not quoted and character in ">])":
            depth -= 1
        elif not quoted and character == "," and depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
    parts.append(text[begin:end])
    context = attribute.context
    return b"".join(_read_dense(ir.Attribute.parse(part.strip(), context)) for part in parts if part.strip())


def _read_dense(attribute: Any) -> bytes:
    import numpy as np

    text = str(attribute.type)
    if match := re.search(r"[x<]([a-z]+)(\d+)>$", text):
        if int(match[2]) % 8 and match[2] != "1":
            raise make_static_error("util.buffer.constant", f"has the packed type {text}")
        return np.asarray(attribute).tobytes()
    raise make_static_error("util.buffer.constant", f"has an unsupported value {str(attribute)[:60]}")
