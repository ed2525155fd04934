"""Profiles of a board whose clock has a large offset and a different speed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hil.core.clock import ClockFit
from hil.core.timeline import InvokeTiming, OpRow, Profile, Sample, Span

HOUR = 3_600_000_000_000
MS = 1_000_000
US = 1000
# Start of a profile on the host's clock.
BEGIN = 20_000 * MS


def row(op: str, start_ns: int, duration_ns: int, **more: Any) -> OpRow:
    """Return an operation of the model on a board named ``sim``."""
    known = {"run": "made", "iteration": 0, "board": "sim", "runtime": "iree", "kind": "compute"}
    nodes = {"onnx_nodes": (op,), "op_types": ("Conv",)} if more.get("kind", "compute") == "compute" else {}
    return OpRow(
        **{"onnx_nodes": (), "op_types": (), **known, **nodes, **more},
        op=op,
        start_ns=start_ns,
        duration_ns=duration_ns,
    )


def profile(rows: Sequence[OpRow] = (), **more: Any) -> Profile:
    """Return a profile with only these rows, on the host's clock."""
    known = {"run": "made", "model": "m", "board": "sim", "runtime": "iree 3.13"}
    empty: dict[str, Any] = {
        "stages": [],
        "transfers": [],
        "calls": [],
        "counters": [],
        "clock": ClockFit(0, 0.0, 0, 0),
    }
    return Profile(**{**known, **empty, **more}, rows=rows)


def run_on(
    board: str = "sim",
    *,
    run: str = "made",
    iterations: int = 4,
    ops: int = 6,
    offset_ns: int = HOUR,
    drift: float = 200e-6,
    slower: float = 1.0,
    seed: int = 0,
    delay_ns: int = 10 * MS,
) -> Profile:
    """Return a run with a timed call and a profiled call, over a link with this delay in each direction.

    Operation ``k`` computes the nodes ``convK`` and ``reluK`` on up to four threads. The last operation is runtime
    overhead.
    """
    dice = random.Random(seed)
    clock = ClockFit(offset_ns, drift, BEGIN, 12_000)
    stages = [Span("compile", BEGIN, BEGIN + 90 * MS), Span("push", BEGIN + 90 * MS, BEGIN + 140 * MS)]
    transfers = [Span("put m.vmfb", BEGIN + 91 * MS, BEGIN + 139 * MS, {"bytes_out": 5000, "bytes_in": 20})]
    calls, rows, sent = [], [], BEGIN + 140 * MS
    for kind in ("timed", "profiled"):
        begun = at = _to_board(clock, sent + delay_ns)
        at += 2 * MS
        windows = []
        for iteration in range(iterations):
            first = at
            for number in range(ops):
                took = round(dice.randint(20, 60) * US * slower)
                if kind == "profiled":
                    rows.append(_row(number, number == ops - 1, iteration, at, took, dice, run=run, board=board))
                at += took + dice.randint(0, 300)
            windows.append((first, at))
        board_span = Span("run", begun, at + MS)
        received = clock.to_host(at + MS) + delay_ns
        calls.append(InvokeTiming(kind, Span("Invoke", sent, received), board_span, 2 * MS, windows))
        transfers.append(Span("Invoke", sent, received, {"bytes_out": 4096, "bytes_in": 400}))
        sent = received + MS
    stages.append(Span("run", BEGIN + 140 * MS, sent))
    seen = range(BEGIN, sent, 20 * MS)
    counters = [
        Sample(_to_board(clock, at), name, value, unit)
        for at in seen
        for name, value, unit in (("cpu0 busy", 50.5, "%"), ("memory available", 2.0**31, "bytes"))
    ]
    made = profile(rows, run=run, board=board, stages=stages, transfers=transfers)
    return replace(made, calls=calls, counters=counters, clock=clock)


def _to_board(clock: ClockFit, host_ns: int) -> int:
    return host_ns + clock.offset_ns + round(clock.drift * (host_ns - clock.at_host_ns))


def _row(number: int, copies: bool, iteration: int, at: int, took: int, dice: random.Random, **more: Any) -> OpRow:
    if copies:
        return row("buffer.copy", at, took, iteration=iteration, kind="runtime", **more)
    told: dict[str, Any] = {
        "onnx_nodes": (f"conv{number}", f"relu{number}"),
        "op_types": ("Conv", "Relu"),
        "tiles": 16,
        "tile_time_ns": took * dice.randint(1, 4),
        "shapes": "1x8x8xf32, 3x3xf32 -> 1x8x8xf32",
        "bytes": 1000 + number,
        "flops": 10**12,
        "bound_estimate": "memory" if number % 2 else "compute",
    }
    return row(f"dispatch_{number}", at, took, iteration=iteration, **told, **more)
