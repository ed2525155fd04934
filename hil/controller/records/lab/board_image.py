"""Record of the image on a board."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Record, note


class ProvisionedImage(Record, kw_only=True):
    """Image that `hil board provision` or `hil farm provision` wrote to a board."""

    schema: Literal[1] = 1
    file: Annotated[str, note("name of the file")]
    sha256: Annotated[str, note("digest of the file, in hex")]
    time_s: Annotated[float, note("seconds since the epoch")]
    board_id: Annotated[str, note("board's id after the command; empty if unknown")] = ""
