"""Events, the nodes they belong to and the estimates of these, joined into the profile's rows."""

from __future__ import annotations

from collections.abc import Iterator

from hil.controller.analysis.profile.estimate import RIDGE, Estimate, Estimates
from hil.controller.analysis.profile.iree_events import DISPATCH, IreeEvents
from hil.controller.analysis.profile.onnxruntime_events import HOLDERS, OnnxRuntimeEvents
from hil.controller.analysis.profile.sites import Site, Sites
from hil.core.timeline import OpRow

COMPUTE, RUNTIME = "compute", "runtime"


def iree_rows(
    events: IreeEvents, sites: Sites, *, run: str, board: str, notes: list[str], ridge: float = RIDGE
) -> Iterator[OpRow]:
    """The rows of a profile of IREE's in the order of their start; what belongs to no iteration is left out.

    Args:
        events: what happened.
        sites: of the program that ran.
        run, board: their names.
        notes: what is uncertain of the nodes' names is put here, a line each, before the first row.
        ridge: operations a byte at which computing takes as long as moving.
    """
    submitted, which = events.submitted()
    matched = [sites.match(submissions) for submissions in submitted]
    notes += dict.fromkeys(note for _, doubts in matched for note in doubts)
    for event in events.events():
        if event.iteration < 0:
            continue
        site = Site(event.key, ())
        if event.place is not None:
            site = matched[which[event.iteration]][0][event.submission][event.place]
        yield OpRow(
            run=run,
            iteration=event.iteration,
            board=board,
            runtime="iree",
            op=event.key or event.op,
            kind=COMPUTE if event.op == DISPATCH else RUNTIME,
            onnx_nodes=site.nodes,
            op_types=tuple(sites.op_types.get(node, "") for node in site.nodes),
            start_ns=event.start_ns,
            duration_ns=event.duration_ns,
            tiles=event.tiles,
            tile_time_ns=event.tile_time_ns,
            shapes=site.shapes,
            bytes=site.bytes if event.op == DISPATCH else event.bytes or None,
            flops=site.flops,
            bound_estimate=Estimate(site.flops, site.bytes, ridge=ridge).bound,
        )


def onnxruntime_rows(events: OnnxRuntimeEvents, estimates: Estimates, *, run: str, board: str) -> Iterator[OpRow]:
    """The rows of a profile of ONNX Runtime's in the order of their start.

    Args:
        events: what happened.
        estimates: of the model that ran.
        run, board: their names.
    """
    for event in events.events():
        # What holds other kernels is no operation besides theirs.
        is_compute = event.op_type not in HOLDERS
        nodes = event.nodes if is_compute else ()
        estimate = estimates.of(nodes if event.computes else ())
        yield OpRow(
            run=run,
            iteration=event.iteration,
            board=board,
            runtime="onnxruntime",
            op=event.name,
            kind=COMPUTE if is_compute else RUNTIME,
            onnx_nodes=nodes,
            op_types=tuple(estimates.nodes[node].op_type if node in estimates.nodes else "" for node in nodes),
            start_ns=event.start_ns,
            duration_ns=event.duration_ns,
            shapes=event.shapes,
            bytes=estimate.bytes,
            flops=estimate.flops,
            bound_estimate=estimate.bound,
        )
