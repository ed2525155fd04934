"""What a bundle's cases came to, in few words and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hil.bundles.cases import Method


@dataclass(frozen=True)
class Worst:
    """The worst of all outputs of a case; None where nothing could be measured.

    Attributes:
        mismatches, elements: how many values are out of tolerance, of how many.
        max_abs: the largest difference.
        max_ulp: the largest one in representable values.
        sqnr_db: the least signal-to-noise ratio.
    """

    mismatches: int | None
    elements: int | None
    max_abs: float | None
    max_ulp: int | None
    sqnr_db: float | None


def worst(outputs: Iterable[Mapping[str, Any]]) -> Worst:
    """The statistics of a case in one line.

    Args:
        outputs: the fields of :class:`hil.core.results.OutputComparison` of each output.
    """
    found = list(outputs)

    def known(name: str) -> list[Any]:
        return [output[name] for output in found if output[name] is not None]

    return Worst(
        mismatches=sum(known("mismatches")) if known("mismatches") else None,
        elements=sum(known("elements")) if known("elements") else None,
        max_abs=max(known("max_abs"), default=None),
        max_ulp=max(known("max_ulp"), default=None),
        sqnr_db=min(known("sqnr_db"), default=None),
    )


def told(found: Worst) -> str:
    """The same for people: ``0 of 10 out of tolerance, max abs 1.2e-07, 3 ULP, 141 dB``."""
    if found.mismatches is None:
        return "nothing could be measured"
    words = [f"{found.mismatches} of {found.elements} out of tolerance"]
    if found.max_abs is not None:
        words.append(f"max abs {found.max_abs:.3g}")
    if found.max_ulp is not None:
        words.append(f"{found.max_ulp} ULP")
    if found.sqnr_db is not None:
        words.append(f"{found.sqnr_db:.3g} dB")
    return ", ".join(words)


def untested(methods: Sequence[Method]) -> str:
    """How many methods have no case, and which: ``1 of 2 methods has no case: twice``; "" where each has one."""
    found = [method.name for method in methods if not method.cases]
    if not found:
        return ""
    count = f"{len(found)} of {len(methods)} method{'' if len(methods) == 1 else 's'}"
    return f"{count} {'has' if len(found) == 1 else 'have'} no case: {', '.join(found)}"
