"""Convert the profile of a microcontroller: to rows, or to ticks if the board is emulated."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hil.controller.analysis.profile.compilation.estimate import Estimate
from hil.controller.analysis.profile.sites import DispatchSite
from hil.core.timeline import OpRow, OpTicks, Ticks
from hil.formats.operations import Operation


@dataclass(frozen=True)
class FirmwareSteps:
    """Executed steps of firmware, with the sites of the dispatches.

    Args:
        operations: steps of all runs in order, without warm-up runs.
        sites: one for every dispatch of a run; empty if the nodes are unknown.
        op_types: node -> operator.
    """

    operations: Sequence[Operation]
    sites: Sequence[DispatchSite]
    op_types: Mapping[str, str]

    def _iter_sited(self) -> Iterator[tuple[Operation, DispatchSite]]:
        places: dict[int, int] = defaultdict(int)
        for one in self.operations:
            site = DispatchSite(one.name, one.nodes)
            if not one.is_overhead:
                if places[one.run] < len(self.sites):
                    site = self.sites[places[one.run]]
                places[one.run] += 1
            yield one, site

    def _list_types(self, site: DispatchSite) -> tuple[str, ...]:
        return tuple(self.op_types.get(node, "") for node in site.nodes)

    def iter_rows(self, *, runtime: str, run: str, board: str, warmup: int) -> Iterator[OpRow]:
        """Yield the steps as rows, by start."""
        for one, site in self._iter_sited():
            yield OpRow(
                run=run,
                iteration=one.run - warmup,
                board=board,
                runtime=runtime,
                op=one.name,
                kind=_get_kind(one),
                onnx_nodes=site.nodes,
                op_types=self._list_types(site),
                start_ns=one.start_ns,
                duration_ns=one.end_ns - one.start_ns,
                shapes=site.shapes,
                bytes=site.bytes,
                flops=site.flops,
                bound_estimate=Estimate(site.flops, site.bytes).bound,
            )

    def sum_ticks(self, instructions_per_tick: float) -> Ticks:
        """Return the ticks of operations. Steps with the same name and nodes are one operation."""
        groups: dict[tuple[str, str, tuple[str, ...]], _StepTicks] = {}
        runs: dict[int, int] = defaultdict(int)
        for one, site in self._iter_sited():
            group = groups.setdefault((one.name, _get_kind(one), site.nodes), _StepTicks(site, defaultdict(list)))
            group.ticks[one.run].append(one.ticks or 0)
            runs[one.run] += one.ticks or 0
        totals = {key: [sum(ticks) for ticks in group.ticks.values()] for key, group in groups.items()}
        medians = {key: float(statistics.median(each)) for key, each in totals.items()}
        everything = sum(medians.values())
        found = [
            OpTicks(
                name=name,
                kind=kind,
                onnx_nodes=nodes,
                op_types=self._list_types(group.site),
                calls=len(next(iter(group.ticks.values()))),
                p50=medians[name, kind, nodes],
                minimum=min(totals[name, kind, nodes]),
                maximum=max(totals[name, kind, nodes]),
                share=medians[name, kind, nodes] / everything if everything else 0.0,
                shapes=group.site.shapes,
                bytes=group.site.bytes,
                flops=group.site.flops,
            )
            for (name, kind, nodes), group in groups.items()
        ]
        return Ticks(
            iterations=len(runs),
            instructions_per_tick=instructions_per_tick,
            p50=float(statistics.median(runs.values())) if runs else 0.0,
            operations=tuple(found),
        )


@dataclass(frozen=True)
class _StepTicks:
    site: DispatchSite
    ticks: dict[int, list[int]]  # by run


def _get_kind(one: Operation) -> str:
    return "runtime" if one.is_overhead else "compute"
