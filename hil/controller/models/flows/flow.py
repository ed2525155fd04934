"""Define a flow: the settings for compiling and judging a suite's models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Flow:
    """Settings for compiling and judging a suite's models.

    Attributes:
        name, runtime: values for ``--flow`` and ``--runtime``.
        device: device of the runtime, such as ``vulkan``; "" is the board's device.
        compiler: name of the compiler; "" is the runtime's default.
        compile_flags: compiler options.
        recipe: transformation to apply first, a name from the entry points ``hil.recipes``; "" for none.
        settings: recipe settings that differ from the defaults.
        references: names of references, unless the user specifies references; empty uses the default for the model's
            format.
        accept: criteria that replace a tolerance, unless the user specifies criteria.
        rtol, atol: tolerance against the flow's reference (the model after the recipe); None uses the case's tolerance
            or the dtype's default.
        quanta: maximum deviation from that reference in quantisation steps (docs/suites.md, Flows); None uses ``atol``
            or the case's tolerance.
        min_sqnr_db: minimum SQNR against the model before the recipe, in dB; None disables the check.
        arithmetic: runtime arithmetic; "" uses the board's config.
        description: text for lists.
    """

    name: str
    runtime: str
    device: str = ""
    compiler: str = ""
    compile_flags: tuple[str, ...] = ()
    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    rtol: float | None = None
    atol: float | None = None
    quanta: float | None = None
    min_sqnr_db: float | None = None
    arithmetic: str = ""
    description: str = ""

    def with_runtime(self, runtime: str) -> Flow:
        """Return the flow for a different runtime.

        The new flow has no device, compiler, flags or arithmetic, because these settings apply to the original runtime.
        Its name contains the flow and the runtime. For a flow without settings that is named like its runtime, the name
        is only the new runtime.
        """
        if runtime in ("", self.runtime):
            return self
        is_plain = replace(self, description="") == Flow(self.runtime, self.runtime)
        name = runtime if is_plain else f"{self.name}-{runtime}"
        return replace(self, name=name, runtime=runtime, device="", compiler="", compile_flags=(), arithmetic="")
