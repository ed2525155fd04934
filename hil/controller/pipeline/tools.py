"""Bundle the objects that the stages of a case use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import ProgressSink
from hil.controller.pipeline.settings.options import Options
from hil.controller.storage.run_context import RunContext
from hil.core.board_config import BoardConfig


@dataclass(frozen=True)
class Tools:
    """Objects that the stages use."""

    context: RunContext
    config: BoardConfig | None = None  # config of the board to compile for; None until known
    session: BoardSession | None = None  # the board to run on; None for stages that need no board
    sink: ProgressSink = field(default_factory=ProgressSink)
    lasting: bool = True  # keep the case directories at the end
    logs: bool = True  # fetch the program's stderr after a successful run; a crash always includes it


def make_reference_settings(options: Options, context: RunContext, log: Path) -> dict[str, Any]:
    """Return the arguments to run and to measure references."""
    return {
        "cache": context.cache,
        "isolated": context.isolated,
        "recompute": options.recompute,
        "timeout": options.timeout,
        "log": log,
    }
