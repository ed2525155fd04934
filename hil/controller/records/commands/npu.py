"""Record of `hil profile npu`: estimates of Vela, with the measured ticks of a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Count, Record, note


class NpuOperator(Record, kw_only=True):
    """An operator of a TFLite model, with the estimate of Vela."""

    name: Annotated[str, note("output tensor")]
    op_type: Annotated[str, note("operator, as Vela names it")]
    device: Annotated[Literal["npu", "cpu"], note("processor that Vela chose")]
    cycles: Annotated[int | None, note("estimated NPU cycles; null on the CPU, for which Vela has no estimate")]
    share: Annotated[float | None, note("cycles divided by the sum over all operators; null on the CPU")]
    macs: Annotated[Count, note("multiplications with addition")]
    reason: Annotated[str, note("why the operator stays on the CPU, as reported by Vela; empty on the NPU")]
    ticks: Annotated[float | None, note("measured ticks of its dispatches; null without a matching dispatch")] = None
    dispatches: Annotated[tuple[str, ...], note("dispatches of the profile with nodes of the operator")] = ()


class NpuEstimate(Record, kw_only=True):
    """Output of `hil profile npu`. Cycles are estimates of Vela, not measurements."""

    model: Annotated[str, note("file")]
    vela: Annotated[str, note("version of Vela")]
    accelerator: Annotated[str, note("configuration of the NPU, such as ethos-u55-128")]
    system_config: Annotated[str, note("speed of the memories that Vela assumes")]
    memory_mode: str
    clock_hz: Annotated[float, note("clock of the NPU that Vela assumes")]
    cycles: Annotated[int, note("estimated NPU cycles of an inference, without operators on the CPU")]
    npu_operators: Count
    cpu_operators: Count
    sram_bytes: Annotated[Count, note("SRAM that the NPU needs")]
    operators: Annotated[list[NpuOperator], note("in the order of execution")]
    profile: Annotated[str, note("profile with the ticks; empty if none was given")] = ""
    matched_by: Annotated[
        Literal["", "name", "order"],
        note("how hil found the dispatches of operators; `order`: the n-th of a kind, if no name matches"),
    ] = ""
    instructions_per_tick: Annotated[float | None, note("of the emulated board of the profile")] = None
    unmatched: Annotated[tuple[str, ...], note("dispatches of the profile without a matching operator")] = ()
