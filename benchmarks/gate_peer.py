"""Find regressions in series of runs with Otava and asv. The reply to an order contains the index of each regression.

Both tools use their defaults. asv 0.6.6 reports regressions of at least 5 %.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

from asv.step_detect import detect_regressions, detect_steps
from otava.analysis import compute_change_points


def find_with_otava(values: list[float]) -> list[int]:
    """Return the indices where the level rises, according to Otava."""
    points, _ = compute_change_points(values)
    return [int(point.index) for point in points if point.stats.mean_2 > point.stats.mean_1]


def find_with_asv(values: list[float]) -> list[int]:
    """Return the indices where the level rises, according to asv."""
    _, _, found = detect_regressions(detect_steps(values), threshold=0.05)
    return [int(after) for _, after, _, _ in found or ()]


def main() -> None:
    """Serve orders until stdin ends."""
    tools: dict[str, Any] = {"otava": find_with_otava, "asv": find_with_asv}
    print(json.dumps({"otava": version("apache-otava"), "asv": version("asv")}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps({name: find(order["series"]) for name, find in tools.items()}), flush=True)


if __name__ == "__main__":
    main()
