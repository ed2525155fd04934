"""Comparing two 100 MB float32 tensors with every statistic, beside numpy in the same run.

Each case has its bar: ``np.allclose`` alone (ratio at most 1.0), or ``np.array_equal`` where the two are bit-equal
(at most 1.3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks import common
from hil.compare.verdict import compare_output
from hil.core.tensors import Array


def cases(elements: int) -> Iterator[tuple[str, Array, Array, Callable[[Array, Array], bool], float]]:
    """Name, actual, reference, rival and the ratio not to exceed."""
    rng = np.random.default_rng(0)
    b = rng.standard_normal(elements, dtype=np.float32)
    noise = rng.standard_normal(elements, dtype=np.float32)
    yield "bit-equal", b.copy(), b, np.array_equal, 1.3
    yield "close (1e-7 relative noise)", b * (1 + np.float32(1e-7) * noise), b, np.allclose, 1.0
    relu = np.maximum(b, 0)
    yield "close, half of it zeros", relu * (1 + np.float32(1e-7) * noise), relu, np.allclose, 1.0
    yield "one element differs", _one_off(b), b, np.allclose, 1.0
    yield "a third out of tolerance", b + np.float32(1e-5) * noise, b, np.allclose, 1.0
    yield "unrelated", noise, b, np.allclose, 1.0


def _one_off(b: Array) -> Array:
    changed = b.copy()
    changed[b.size // 2] += 1
    return changed


def seconds(function: Callable[[Array, Array], object], actual: Array, reference: Array) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    function(actual, reference)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, elements=25_000_000, rounds=7)
    rows = []
    for name, actual, reference, rival, bar in cases(asked.elements):
        measured: dict[str, Callable[[], Sequence[float]]] = {
            "hil": lambda a=actual, b=reference: [seconds(lambda x, y: compare_output("y", x, y), a, b)],
            "rival": lambda a=actual, b=reference, rival=rival: [seconds(rival, a, b)],
        }
        taken = common.interleave(measured, asked.rounds)
        rows.append(common.beside(name, taken["hil"], f"np.{rival.__name__}", taken["rival"], 1e3, "ms", f"<= {bar}"))
    common.show("compare", rows, [f"float32, {asked.elements} elements a tensor"], as_json=asked.json)


if __name__ == "__main__":
    main()
