"""Keep a labgrid place while a worker uses the board.

A labgrid coordinator forgets all owners when it restarts, and any labgrid user can release a place with ``--kick``.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from hil.controller.farm.labgrid import LabgridPlace
from hil.core.text import TextSink
from hil.errors import BoardUnreachable, HilError

_CHECK_SECONDS = 30.0
# A check that is not older than this many seconds is reused, because a check takes about half a second.
_RECENT_SECONDS = 10.0


class PlaceWatch:
    """Checks an acquired place in a thread, and acquires the place again after a release.

    Use the watch as a context manager. Leave the context before you release the place.

    Args:
        say: receives a message when the place is lost or acquired again.
        on_lost: called in the thread with the reason, once for each loss. Others may have used the board since the last
            check, even if the watch acquires the place again.
    """

    def __init__(
        self,
        place: LabgridPlace,
        say: TextSink,
        every_s: float = _CHECK_SECONDS,
        recent_s: float = _RECENT_SECONDS,
        on_lost: TextSink = lambda why: None,
    ) -> None:
        self._place, self._say, self._every_s, self._recent_s = place, say, every_s, recent_s
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._checked_at = time.monotonic()
        self._is_lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="labgrid-place", daemon=True)

    def __enter__(self) -> PlaceWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        # Wait for a running check: it could acquire the place again after the release.
        self._thread.join()

    def ensure_held(self) -> bool:
        """Acquire the place again if it was released, and return True in this case. A recent check is reused.

        Without a coordinator, no user can acquire the place, so the holder keeps the board.

        Raises:
            BoardBusy: another user has the place.
            BoardError, UsageError: the place cannot be acquired.
        """
        with self._lock:
            if not self._is_lost and time.monotonic() - self._checked_at < self._recent_s:
                return False
            try:
                is_held = self._place.is_held()
            except BoardUnreachable:
                return False
            if not is_held:
                self._is_lost = True
                self._place.acquire()
                self._say(f"labgrid place {self._place.labgrid.place} was released; acquired the place again")
            self._is_lost = False
            self._checked_at = time.monotonic()
            return not is_held

    def _run(self) -> None:
        is_reported = False
        while not self._stop.wait(self._every_s):
            name = f"labgrid place {self._place.labgrid.place}"
            try:
                if self.ensure_held() and not is_reported:
                    self._on_lost(f"{name} was released by another user")
                is_reported = False
            except HilError as error:
                if not is_reported:
                    self._say(f"{name} is lost: {error.message}")
                    self._on_lost(f"{name} is lost: {error.message}")
                is_reported = True
