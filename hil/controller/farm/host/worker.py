"""A board's worker: a process that attends the farm for one board, and does one job after another on it.

The main thread does the jobs, threads of GatewayStream talk with the farm meanwhile. They can end the main thread's
work as Ctrl-C would: the library takes that well, wherever it is.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import queue
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from hil.controller.farm import telemetry
from hil.controller.farm.client import AGAIN_S, FarmClient
from hil.controller.farm.host.board_connection import BoardConnection
from hil.controller.farm.host.gateway_stream import GatewayStream
from hil.controller.farm.host.inventory import BoardEntry, HostInfo
from hil.controller.farm.host.lease_runner import Attempt, LeaseRunner, emptied
from hil.controller.farm.host.uplink_call import ask
from hil.controller.farm.messages import BoardCard, Grant, JobResult, Kind
from hil.controller.farm.rpc import result_message
from hil.core.scratch import remove_tree
from hil.errors import EXIT_BOARD, EXIT_STAGE, FarmUnreachable, HilError
from hil.protocol.v1 import farm_pb2 as pb

# A job that is to end is given so long; then this process ends, and all that it holds with it.
_END_S = 8.0
_LEAVE_S = 2.0
_REPORT_S = 60.0
# Who is to stop tries so often, each time for so long: its host gives it 10 s.
_LAST_TRIES, _LAST_S = 2, 3.0
# Without a job for so long, nothing is kept ready for the next one.
_REST_S = 30.0
_REMEMBERED = 1000
_START_S, _LOOK_S = 20.0, 0.05
_EARLY_S = 5.0
_STOPPED = "the board's host was stopped"


class Worker:
    """Serves one board until it is told to stop (SIGTERM). To be made in the main thread; ``use`` does its jobs."""

    def __init__(self, post: BoardEntry, site: HostInfo, use: Callable[[Attempt], JobResult]) -> None:
        self.post, self.site = post, site
        self.id = f"{site.host}/{post.name}/{secrets.token_hex(6)}"
        self._way = BoardConnection(post, site, self.say)
        self._duty = LeaseRunner(self._way, self._client, max(1, (os.cpu_count() or 1) // site.boards), use)
        self._work = CancellableTask(_END_S, self._give_up)
        self._grants: queue.SimpleQueue[Grant | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._over: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._stopping = False
        self._farm: FarmClient | None = None
        self._attendance = GatewayStream(site.uplink, self.id, self)

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

    def dialled(self, dial: pb.DialIn, gateway: str) -> None:
        """The holder of a lease wants a connection."""
        serving = self._duty.serving
        if serving is not None and serving.lease == dial.lease:
            serving.dialled(dial, gateway)

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

    def _do(self, grant: Grant) -> JobResult | None:
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

    def _was_ended(self, grant: Grant) -> JobResult:
        """What came of a job that was ended: by the farm, because we are to stop, or because it took too long."""
        why = self._work.why
        self.say(f"job {grant.job} was ended: {why}")
        self._hang_up()  # it may have been ended in the middle of a call
        # Whoever held the board may be frozen, session and all: the next lease's fence ends that.
        if grant.spec.kind is not Kind.LEASE and not self._duty.clear_away(grant.fence):
            self._give_up()
        if self._stopping:
            return JobResult(EXIT_BOARD, "BOARD_LOST", _STOPPED, infrastructure=True)
        return JobResult(EXIT_STAGE, "TIMEOUT", why)

    def _report(self, grant: Grant, result: JobResult) -> None:
        """Say how a job ended, until the farm has heard it or does not want to know any more."""
        self._attendance.send_lines()
        fence = self._way.fence if result.infrastructure else 0
        request = pb.ReportRequest(lease=grant.lease, worker=self.id, result=result_message(result), fence=fence)
        tries_left = _LAST_TRIES
        while grant.lease not in self._over:
            try:
                # Saying it twice is no error.
                reply = ask(self.site.uplink, "Report", request, _LAST_S if self._stopping else _REPORT_S)
            except FarmUnreachable:
                if self._stopping:
                    tries_left -= 1
                if not tries_left:
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


T = TypeVar("T")


class CancellableTask:
    """Runs one piece of work after another. To be made, and run, in the main thread.

    Where work that is to end goes on for ``patience_s``, another thread calls ``give_up``.
    """

    def __init__(self, patience_s: float, give_up: Callable[[], None]) -> None:
        self._patience_s, self._give_up = patience_s, give_up
        self._lock = threading.Lock()
        self._key: int | None = None
        self._last: int | None = None
        # Which work is to end, and why: a thread that is slow to say so can mean no later one.
        self._ended: tuple[int | None, str] = (None, "")
        self._raised = False
        signal.signal(signal.SIGUSR1, lambda *_: self.raise_if_ended())

    @property
    def why(self) -> str:
        """For what reason the work that runs, or ran last, was ended; "" where it comes to its own end."""
        key, why = self._ended
        return why if key == self._last else ""

    def run(self, key: int, work: Callable[[], T]) -> T | None:
        """Do some work, told from any other by its key; None where it was ended, for the reason :attr:`why`."""
        self._last, self._raised = key, False
        try:
            try:
                self._key = key
                return work()
            finally:
                self._key = None
        except KeyboardInterrupt:
            self._key = None
            if not self.why:
                raise  # a person's Ctrl-C
            return None

    def end(self, key: int, why: str) -> None:
        """End some work, if it runs. By any thread but the main one."""
        with self._lock:
            if self._key != key or self.why:
                return
            self._ended = (key, why)
        watch = threading.Timer(self._patience_s, self._look, [key])
        watch.daemon = True
        watch.start()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def end_here(self, why: str) -> None:
        """End the work that runs, if any. By a signal's handler."""
        if self._key is not None:
            self._ended = (self._key, self.why or why)
            self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """In a signal's handler: leave the work that is to end, once."""
        if self._key is not None and self.why and not self._raised:
            self._raised = True
            raise KeyboardInterrupt

    def _look(self, key: int) -> None:
        if self._key == key:
            self._give_up()


@contextlib.contextmanager
def scratch_folder(post: BoardEntry, site: HostInfo) -> Iterator[None]:
    """Everything temporary of this process, and of what it starts, goes to the board's own folder.

    What a former worker of the board left there goes first. The path is short: sockets are made there too.
    """
    mark = hashlib.sha256(post.name.encode()).hexdigest()[:8]
    folder = str(emptied(site.sockets / mark))
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        os.environ.pop("TMPDIR")
        if before[1] is not None:
            os.environ["TMPDIR"] = before[1]
        remove_tree(Path(folder))
