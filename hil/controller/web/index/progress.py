"""Progress of the indexer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class IndexProgress:
    """Progress of the indexer, for pages."""

    sessions: int = 0  # sessions in the last scan
    to_read: int = 0  # new or changed sessions in the last scan
    read: int = 0  # sessions among ``to_read`` that were read
    cases: int = 0  # cases read since the start
    generation: int = 0  # increments after index changes
    first_done: bool = False  # True after all directories were read
    changed: threading.Condition = field(default_factory=threading.Condition)

    def tell(self) -> None:
        """Notify threads that wait for a change."""
        with self.changed:
            self.generation += 1
            self.changed.notify_all()
