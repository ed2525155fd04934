"""Convert the profile of a package's runtime to rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hil.controller.analysis.profile.compilation.estimate import Estimates
from hil.core.timeline import OpRow
from hil.formats.operations import Operation


def iter_operation_rows(
    operations: Sequence[Operation], estimates: Estimates, *, runtime: str, run: str, board: str, warmup: int
) -> Iterator[OpRow]:
    """Yield the rows by start, without warm-up runs."""
    for one in operations:
        if one.run < warmup:
            continue
        estimate = estimates.estimate(one.nodes)
        types = tuple(estimates.nodes[node].op_type if node in estimates.nodes else "" for node in one.nodes)
        yield OpRow(
            run=run,
            iteration=one.run - warmup,
            board=board,
            runtime=runtime,
            op=one.name,
            kind="runtime" if one.is_overhead else "compute",
            onnx_nodes=tuple(one.nodes),
            op_types=tuple(one.op_types) or types,
            start_ns=one.start_ns,
            duration_ns=one.end_ns - one.start_ns,
            shapes=estimate.shapes,
            bytes=estimate.bytes,
            flops=estimate.flops,
            bound_estimate=estimate.bound,
        )
