"""A board's worker: a process that attends the farm for one board, and does one job after another on it.

The main thread does the jobs; threads of :class:`.attendance.Attendance` talk with the farm meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import secrets
import signal
import sys
import threading
import time

from hil.controller.farm import telemetry
from hil.controller.farm.client import FarmClient
from hil.controller.farm.host.attempt import AGAIN_S
from hil.controller.farm.host.attendance import Attendance
from hil.controller.farm.host.board_connection import Way
from hil.controller.farm.host.duty import Duty
from hil.controller.farm.host.ending import Endable
from hil.controller.farm.host.posts import Post, Site
from hil.controller.farm.words import BoardCard, Grant, Kind, Result
from hil.errors import EXIT_BOARD, EXIT_STAGE, FarmUnreachable, HilError
from hil.protocol.v1 import farm_pb2 as pb

# A job that is to end is given so long; then this process ends, and all that it holds with it.
_END_S = 8.0
_LEAVE_S = 2.0
# Without a job for so long, nothing is kept ready for the next one.
_REST_S = 30.0
_REMEMBERED = 1000
_START_S, _LOOK_S = 20.0, 0.05
_EARLY_S = 5.0
_STOPPED = "the board's host was stopped"


class Worker:
    """Serves one board until it is told to stop (SIGTERM). To be made in the main thread.

    Args:
        post: the board.
        site: its host's.
    """

    def __init__(self, post: Post, site: Site) -> None:
        self.post, self.site = post, site
        self.id = f"{site.host}/{post.name}/{secrets.token_hex(6)}"
        self._way = Way(post, site, self.say)
        self._duty = Duty(self._way, self._client, max(1, (os.cpu_count() or 1) // site.boards))
        self._work = Endable(_END_S, self._give_up)
        self._grants: queue.SimpleQueue[Grant | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._over: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._stopping = False
        self._farm: FarmClient | None = None
        self._attendance = Attendance(site.farm, self.id, self)

    def serve(self) -> None:
        """Attend the farm and do what comes."""
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A board that takes long to look at (its agent is put there now) is presented meanwhile by its config alone.
        early = threading.Timer(_EARLY_S, self._attendance.start)
        early.daemon = True
        early.start()
        self._work.run(0, self._look)
        early.cancel()
        if not self._attendance.start():
            self._attendance.present()
        try:
            while not self._stopping:
                self._next()
        finally:
            self._attendance.close(_LEAVE_S)
            self._duty.rest()
            self._way.close()
            self._hang_up()
            telemetry.flush()

    # ---- what the attendance is told

    def card(self) -> BoardCard:
        """The board as it is now."""
        return self._way.card()

    def leases(self) -> list[int]:
        """Those that are worked on, or wait for it."""
        with self._lock:
            return sorted(self._held)

    def granted(self, grant: Grant) -> None:
        """The board was given to a job; one that is known is not begun again."""
        with self._lock:
            if grant.lease in self._held or grant.lease in self._over:
                return
            self._held.add(grant.lease)
        self._grants.put(grant)

    def ended(self, lease: int, reason: str) -> None:
        """A lease is over: what runs is ended, and nothing more is done to the board."""
        self._forget(lease, reason)
        self._work.end(lease, reason)

    def dialled(self, dial: pb.DialIn, client: FarmClient) -> None:
        """The holder of a lease wants a connection."""
        serving = self._duty.serving
        if serving is not None and serving.lease == dial.lease:
            serving.dialled(dial, client)

    def say(self, text: str) -> None:
        """Tell whoever looks after the host."""
        print(f"{self.post.name}: {text}", file=sys.stderr, flush=True)

    # ---- jobs, in the main thread

    def _look(self) -> None:
        """Find out what the board is; one that does not answer is presented all the same, to be checked."""
        if self._way.is_borrowed:
            return  # only its owner has it, who is told by the farm
        # A simulator is starting just now, as we are.
        deadline = time.monotonic() + (_START_S if self.post.simulator else 0.0)
        while True:
            try:
                return self._way.look()
            except HilError as error:
                if time.monotonic() > deadline:
                    return self.say(str(error))
            time.sleep(_LOOK_S)

    def _next(self) -> None:
        try:
            grant = self._grants.get(timeout=_REST_S)
        except queue.Empty:
            self._duty.rest()
            if self._way.is_borrowed and not self._attendance.owner:
                self._way.close()
            return
        if grant is None:
            return
        result = self._work.run(grant.lease, lambda: self._do(grant))
        if self._work.why:
            result = self._was_ended(grant)
        if result is not None:
            self._report(grant, result)
        self._forget(grant.lease, "done")
        self._attendance.finished(grant.lease)

    def _do(self, grant: Grant) -> Result | None:
        if grant.lease in self._over:
            return None
        too_long = f"it had the board for {grant.timeout_s:g} s, its limit"
        late = threading.Timer(grant.timeout_s, self._work.end, [grant.lease, too_long])
        late.daemon = True
        if grant.spec.kind is not Kind.LEASE:
            late.start()
        try:
            return self._duty.do(grant, self._attendance)
        finally:
            late.cancel()

    def _was_ended(self, grant: Grant) -> Result:
        """What came of a job that was ended: by the farm, because we are to stop, or because it took too long."""
        why = self._work.why
        self.say(f"job {grant.job} was ended: {why}")
        self._hang_up()  # it may have been ended in the middle of a call
        # Whoever held the board may be frozen, session and all: the next lease's fence ends that.
        if grant.spec.kind is not Kind.LEASE and not self._duty.clear_away(grant.fence):
            self._give_up()
        if self._stopping:
            return Result(EXIT_BOARD, "BOARD_LOST", _STOPPED, infrastructure=True)
        return Result(EXIT_STAGE, "TIMEOUT", why)

    def _report(self, grant: Grant, result: Result) -> None:
        """Say how a job ended, until the farm has heard it or does not want to know any more."""
        self._attendance.send_lines()
        text = json.dumps(result.to_json())
        fence = self._way.fence if result.infrastructure else 0
        while grant.lease not in self._over:
            try:
                reply = self._client().report(grant.lease, self.id, text, fence)
            except FarmUnreachable:
                if self._stopping:
                    return
                time.sleep(AGAIN_S)
                continue
            except HilError as error:
                self.say(f"the farm takes no result of job {grant.job}: {error}")
                return
            if not reply.recorded:
                self.say(f"the result of job {grant.job} counts for nothing: {reply.reason}")
            return

    def _client(self) -> FarmClient:
        if self._farm is None:
            self._farm = FarmClient(self.site.farm, patience_s=_LEAVE_S if self._stopping else 30.0)
        return self._farm

    def _hang_up(self) -> None:
        farm, self._farm = self._farm, None
        if farm is not None:
            farm.close()

    def _forget(self, lease: int, why: str) -> None:
        with self._lock:
            self._held.discard(lease)
            self._over.setdefault(lease, why)
            while len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)

    def _on_stop(self, *_: object) -> None:
        self._stopping = True
        self._grants.put(None)
        self._work.end_here(_STOPPED)

    def _give_up(self) -> None:
        """What runs cannot be ended: this process is, and all that it holds goes with it."""
        self.say("a job that was ended goes on: its process ends with it")
        with contextlib.suppress(OSError):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)
