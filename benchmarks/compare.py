"""Comparing two 100 MB float32 tensors with every statistic, beside numpy in the same run.

Each case has its bar: ``np.allclose`` alone (ratio at most 1.0), or ``np.array_equal`` where the two are bit-equal
(at most 1.3). Rounds of hil and its rival alternate; the ratio is the median of the rounds' ratios. Run it with
``python benchmarks/compare.py [--json] [--elements N] [--rounds N]``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

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
    """Print the table, or one JSON document with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--elements", type=int, default=25_000_000, help="float32 elements a tensor (default: 100 MB)")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    rows = []
    for name, actual, reference, rival, bar in cases(options.elements):
        mine: list[float] = []
        theirs: list[float] = []
        for _ in range(options.rounds + 1):  # the first round is warm-up
            mine.append(seconds(lambda a, b: compare_output("y", a, b), actual, reference))
            theirs.append(seconds(rival, actual, reference))
        del mine[0], theirs[0]
        rows.append(
            {
                "case": name,
                "rival": f"np.{rival.__name__}",
                "hil_ms": round(statistics.median(mine) * 1e3, 2),
                "rival_ms": round(statistics.median(theirs) * 1e3, 2),
                "ratio": round(statistics.median(m / t for m, t in zip(mine, theirs, strict=True)), 3),
                "bar": bar,
            }
        )
    if options.json:
        machine = {"cpu": platform.processor() or platform.machine(), "numpy": np.__version__}
        print(json.dumps({"benchmark": "compare", "elements": options.elements, **machine, "rows": rows}, indent=2))
        return
    print(f"{'case':<30}{'rival':<16}{'hil ms':>10}{'rival ms':>10}{'ratio':>8}{'bar':>6}")
    for row in rows:
        print("{case:<30}{rival:<16}{hil_ms:>10.1f}{rival_ms:>10.1f}{ratio:>8.2f}{bar:>6.1f}".format(**row))


if __name__ == "__main__":
    main()
