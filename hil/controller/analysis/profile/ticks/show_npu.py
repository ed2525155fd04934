"""Show Vela's estimates in the terminal, next to the ticks of a profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hil.controller.analysis.profile.ticks.columns import ProfileColumn, make_named_table
from hil.controller.analysis.profile.ticks.show_ticks import format_ticks
from hil.controller.records.commands.npu import NpuEstimate, NpuOperator
from hil.controller.storage.screen.texts import make_plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def print_estimate(console: Console, found: NpuEstimate) -> None:
    """Print the estimated cycles of operators, and why operators stay on the CPU."""
    from rich.text import Text

    console.print(
        Text.assemble((make_plain(found.model), "bold"), f" on {found.accelerator}, estimated by Vela {found.vela}"),
        soft_wrap=True,
    )
    memory = f"{found.system_config}, {found.memory_mode}"
    total = f"{found.cycles:,} NPU cycles, {found.sram_bytes:,} bytes of SRAM"
    console.print(f"  estimate      {total} ({memory}, {found.clock_hz / 1e6:g} MHz)", highlight=False, soft_wrap=True)
    console.print(
        f"  operators     {found.npu_operators} on the NPU, {found.cpu_operators} on the CPU", highlight=False
    )
    if found.instructions_per_tick is not None:
        what = f"measured by {make_plain(found.profile)} on an emulated CPU: "
        text = f"{what}1 tick is {found.instructions_per_tick:.3g} instructions, and not a time"
        console.print(f"  ticks         {text}", highlight=False, soft_wrap=True)
    if found.matched_by == "order":
        text = "by order, because no name matches: the n-th convolution, product, pooling and softmax"
        console.print(f"  matched       {text}", highlight=False, soft_wrap=True)
    shown = found.operators
    columns = [
        ProfileColumn("on", [one.device.upper() for one in shown], 1),
        ProfileColumn("est. cycles", ["-" if one.cycles is None else f"{one.cycles:,}" for one in shown], 2),
        ProfileColumn("share", ["-" if one.share is None else f"{one.share:.1%}" for one in shown], 4),
        ProfileColumn("MACs", [f"{one.macs:,}" for one in shown], 5),
    ]
    if found.profile:
        ticks = ["-" if one.ticks is None else format_ticks(one.ticks) for one in shown]
        columns.append(ProfileColumn("ticks", ticks, 3))
    console.print()
    console.print(make_named_table(console, "operator", list(map(_make_name, shown)), columns))
    for one in shown:
        if one.device == "cpu":
            text = f"  {one.op_type} {make_plain(one.name)} stays on the CPU: {make_plain(one.reason)}"
            console.print(Text(text, style="yellow"), soft_wrap=True)
    if found.unmatched:
        names = ", ".join(make_plain(name) for name in found.unmatched[:3])
        more = f" and {len(found.unmatched) - 3} more" if len(found.unmatched) > 3 else ""
        console.print(Text(f"  dispatches without a matching operator: {names}{more}", style="dim"), soft_wrap=True)


def _make_name(one: NpuOperator) -> Text:
    from rich.text import Text

    name = Text(make_plain(one.op_type))
    name.append(f"\n{make_plain(one.name)}", "dim")
    return name
