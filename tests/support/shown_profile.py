"""Profile with sums that a reader can check, for tests of modules that show profiles."""

from __future__ import annotations

from dataclasses import replace

from hil.core.clock import ClockFit
from hil.core.timeline import InvokeTiming, OpRow, Profile, Sample, Span

US = 1000
START = 5_000_000
# An iteration: op, nodes, types, start and duration in us, tiles' time in us, flops, bytes, bound.
_OPS = (
    ("matmul_0", ("fc1", "relu1"), ("Gemm", "Relu"), 0, 60, 120, 120_000, 6_000, "compute"),
    ("matmul_1", ("fc2",), ("Gemm",), 60, 20, 20, 20_000, 4_000, "memory"),
    ("matmul_1", ("fc3",), ("Gemm",), 80, 10, 10, 10_000, 2_000, "memory"),
    ("buffer.copy", (), (), 90, 10, None, None, None, ""),
)
_PERIOD_NS = 200 * US


def example(
    run: str = "digits",
    *,
    iterations: int = 3,
    slower: float = 1.0,
    timed_ns: int = 80 * US,
    timed_runs: int = 2,
) -> Profile:
    """Return a profile with 100 us per iteration. ``fc2`` takes ``slower`` times as long. The timed runs take
    ``timed_ns``.
    """
    rows = [
        OpRow(
            run=run,
            iteration=iteration,
            board="sim",
            runtime="iree",
            op=op,
            kind="compute" if nodes else "runtime",
            onnx_nodes=nodes,
            op_types=types,
            start_ns=START + iteration * _PERIOD_NS + start * US,
            duration_ns=round(duration * US * (slower if nodes == ("fc2",) else 1)),
            tiles=4 if nodes else None,
            tile_time_ns=None if tile_time is None else tile_time * US,
            shapes="1x4xf32 -> 1x4xf32" if nodes else "",
            flops=flops,
            bytes=moved,
            bound_estimate=bound,
        )
        for iteration in range(iterations)
        for op, nodes, types, start, duration, tile_time, flops, moved, bound in _OPS
    ]
    windows = [(START + n * _PERIOD_NS, START + n * _PERIOD_NS + 100 * US) for n in range(iterations)]
    timed = [(START - (timed_runs + 1 - n) * timed_ns, START - (timed_runs - n) * timed_ns) for n in range(timed_runs)]
    return Profile(
        run=run,
        model="digits_cnn",
        board="sim",
        runtime="iree 3.13.0 on local-task",
        rows=rows,
        stages=[Span("compile", 0, 3_000_000)],
        transfers=[Span("push program", 3_000_000, 3_100_000, {"bytes_out": 4096, "bytes_in": 20})],
        calls=[
            _call("timed", timed),
            _call("profiled", windows),
        ],
        counters=[Sample(START, "cpu0 busy", 50.0, "%")],
        clock=ClockFit(offset_ns=0, drift=0.0, at_host_ns=0, error_ns=20 * US),
        notes=["this board tells no temperature"],
    )


def _call(kind: str, windows: list[tuple[int, int]]) -> InvokeTiming:
    span = Span("invoke", windows[0][0] - 10 * US, windows[-1][1] + 10 * US) if windows else Span("invoke", 1, 2)
    return InvokeTiming(kind, host=span, board=replace(span, name="run"), iterations_ns=windows)
