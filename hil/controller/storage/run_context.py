"""What the stages of a case share."""

from __future__ import annotations

from dataclasses import dataclass

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated


@dataclass(frozen=True)
class RunContext:
    """What every stage needs.

    Attributes:
        cache: where programs, references and models made of others are kept.
        isolated: processes for what may crash.
    """

    cache: Cache
    isolated: Isolated
