"""What the stages of a case work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.controller.pipeline.board_pool import BoardSession
from hil.controller.pipeline.case import ProgressSink
from hil.controller.pipeline.options import Options
from hil.controller.storage.run_context import RunContext
from hil.core.board_config import BoardConfig


@dataclass(frozen=True)
class Tools:
    """What stages work with."""

    context: RunContext
    config: BoardConfig | None = None  # of the board that the case is compiled for; None until that is known
    session: BoardSession | None = None  # the board that the case runs on; None for the stages that need none
    sink: ProgressSink = field(default_factory=ProgressSink)
    lasting: bool = True  # whether the folders of cases stay when all is over
    logs: bool = True  # whether to ask the board what a program that ran well wrote to stderr; a crash tells it anyway


def reference_settings(options: Options, context: RunContext, log: Path) -> dict[str, Any]:
    """Return the settings that references, and what is measured of them, are called with."""
    return {
        "cache": context.cache,
        "isolated": context.isolated,
        "recompute": options.recompute,
        "timeout": options.timeout,
        "log": log,
    }
