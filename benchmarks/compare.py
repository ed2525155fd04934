"""Compare two 100 MB float32 tensors with all statistics, relative to numpy in the same run.

The rival is ``np.allclose`` (limit of the ratio: 1.0), or ``np.array_equal`` if the tensors are bit-equal (limit: 1.3).
Judging by the control of an arithmetic, or by criteria, has a limit in seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks import common
from hil.compare.control import measure_control
from hil.compare.criteria import parse_accept
from hil.compare.verdict import compare_output
from hil.core.tensors import Array


def cases(elements: int) -> Iterator[tuple[str, Array, Array, Callable[[Array, Array], bool], float]]:
    """Yield name, actual tensor, reference, rival and the limit of the ratio."""
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


# Values in a row of outputs that are judged by rows: classes or channels.
_ROW = 1000
_SIGMA = np.float32(1e-3)  # standard deviation of the noise, like rounding to float16
_CRITERIA = ("max_abs<=0.1", "sqnr>=40", "top1>=0.9", "top1>=0.9, kl<=1e-2")
_CONTROL_BAR, _CRITERIA_BAR = 3.0, 2.0


def judged(elements: int) -> Iterator[tuple[str, Callable[[], object], float]]:
    """Yield name, function and the limit in seconds."""
    rng = np.random.default_rng(0)
    b = rng.standard_normal((elements // _ROW, _ROW), dtype=np.float32)

    def near() -> Array:
        return b * (1 + _SIGMA * rng.standard_normal(b.shape, dtype=np.float32))

    answer, runs = near(), [near(), near()]
    control = measure_control("float16", "benchmark", b, runs, runs)
    yield "by a control: right", lambda: compare_output("y", answer, b, control=control), _CONTROL_BAR
    yield "by a control: wrong", lambda: compare_output("y", -answer, b, control=control), _CONTROL_BAR
    for text in _CRITERIA:
        rules = parse_accept([text])
        yield f"by {text}", lambda rules=rules: compare_output("y", answer, b, accept=rules), _CRITERIA_BAR


def _one_off(b: Array) -> Array:
    changed = b.copy()
    changed[b.size // 2] += 1
    return changed


def seconds(function: Callable[[Array, Array], object], actual: Array, reference: Array) -> float:
    """Return the wall time of a call in seconds."""
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
    for name, call, bar in judged(asked.elements):
        times = common.timed(call, asked.rounds)
        rows.append(common.Row(name, statistics.median(times), "s", bar=f"<= {bar:g} s"))
    common.show("compare", rows, [f"float32, {asked.elements} elements per tensor"], as_json=asked.json)


if __name__ == "__main__":
    main()
