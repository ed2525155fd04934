"""Worker process of a board: attaches to the farm and runs jobs in sequence.

The main thread runs the jobs. Threads of GatewayStream communicate with the farm. These threads cancel a job with a
KeyboardInterrupt in the main thread, which the library handles at any point.
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

from hil.controller.farm import telemetry
from hil.controller.farm.client.client import AGAIN_SECONDS, FarmClient
from hil.controller.farm.host.board_connection import BoardConnection
from hil.controller.farm.host.cancellable_task import CancellableTask
from hil.controller.farm.host.console_endpoint import ConsoleEndpoint
from hil.controller.farm.host.gateway_link.gateway_stream import GatewayStream
from hil.controller.farm.host.gateway_link.uplink_call import ask
from hil.controller.farm.host.image_writer import ImageWriter
from hil.controller.farm.host.inventory import BoardEntry, HostInfo
from hil.controller.farm.host.lease_runner import Attempt, LeaseRunner, empty_folder
from hil.controller.farm.host.power_switch import PowerSwitch
from hil.controller.farm.host.suspicion import is_suspicious, judge_after_probe
from hil.controller.farm.messages import PROBE_SECONDS, BoardCard, Grant, JobResult, Kind
from hil.controller.farm.rpc import encode_result
from hil.core.processes import end_children
from hil.core.results import Outcome
from hil.core.scratch import remove_tree
from hil.errors import EXIT_BOARD, EXIT_STAGE, FarmUnreachable, HilError
from hil.protocol.v1 import farm_pb2 as pb

# Time in seconds for a cancelled job to end. If the job does not end in time, this process kills itself, which frees
# all resources.
_END_SECONDS = 8.0
_LEAVE_SECONDS = 2.0
_REPORT_SECONDS = 60.0
# While it stops, a worker makes at most this many attempts to report, each with this timeout in seconds. The host
# allows 10 s for a stop.
_LAST_TRIES, _LAST_S = 2, 3.0
# While it stops, a worker waits this long for a power action.
_POWER_SECONDS = 5.0
# Then it ends the command of an image, and waits this long for the removal of the image.
_IMAGE_SECONDS = 1.0
# Idle time after which resources prepared for the next job are released.
_REST_SECONDS = 30.0
_REMEMBERED = 1000
_START_S, _LOOK_S = 20.0, 0.05
_EARLY_SECONDS = 5.0
_STOPPED = "the board's host was stopped"


class BoardWorker:
    """Serves a board. SIGTERM stops the worker. Create the worker in the main thread.

    Args:
        use: runs a job on the board.
    """

    def __init__(self, post: BoardEntry, site: HostInfo, use: Callable[[Attempt], JobResult]) -> None:
        self.post, self.site = post, site
        self.id = f"{site.host}/{post.name}/{secrets.token_hex(6)}"
        self._way = BoardConnection(post, site, self.print_message, self._handle_lost_place)
        self._duty = LeaseRunner(self._way, self._get_client, max(1, (os.cpu_count() or 1) // site.boards), use)
        self._work = CancellableTask(_END_SECONDS, self._give_up)
        self._grants: queue.SimpleQueue[Grant | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._over: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._stopping = False
        # Lease of the running job, and lease whose board was lost to another user of labgrid; 0 for none.
        self._running_lease = self._lost_lease = 0
        self._farm: FarmClient | None = None
        self._attendance = GatewayStream(site.uplink, self.id, self)
        self._console = ConsoleEndpoint(lambda: self._way.config, site.farm, self.print_message)
        images = ImageWriter(site, post.folder, lambda: self._way.config, self.print_message, self._handle_image)
        self._power = PowerSwitch(
            post.name,
            lambda: self._way.config,
            self.list_leases,
            self._attendance.report_power,
            write_image=images.write,
        )

    def serve(self) -> None:
        """Attach to the farm and run jobs."""
        signal.signal(signal.SIGTERM, self._handle_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # If the first inspection takes long (it may deploy the agent), present the board with only its config.
        early = threading.Timer(_EARLY_SECONDS, self._attendance.start)
        early.daemon = True
        early.start()
        self._work.run(0, self._inspect_board)
        early.cancel()
        if not self._attendance.start():
            self._attendance.send_card()
        try:
            while not self._stopping:
                self._run_next_job()
        finally:
            self._console.close()
            self._power.close(_POWER_SECONDS)
            self._attendance.close(_LEAVE_SECONDS)
            self._duty.release_resources()
            if self._power.is_writing:
                # The command has its own session, and would write to the board after other jobs started there.
                end_children(())
                self._power.close(_IMAGE_SECONDS)
            self._way.close()
            self._close_client()
            telemetry.flush()

    # ---- listener of the gateway stream

    def get_card(self) -> BoardCard:
        """Return the current description of the board."""
        return self._way.read_card()

    def list_leases(self) -> list[int]:
        """Return the running and the waiting leases."""
        with self._lock:
            return sorted(self._held)

    def queue_grant(self, grant: Grant) -> None:
        """Queue a granted job. Repeated grants are ignored."""
        with self._lock:
            if grant.lease in self._held or grant.lease in self._over:
                return
            self._held.add(grant.lease)
        self._grants.put(grant)

    def cancel_lease(self, lease: int, reason: str) -> None:
        """Cancel the job of an ended lease. The job no longer accesses the board."""
        self._mark_ended(lease, reason)
        self._work.end(lease, reason)
        self._work.end(_probe_key(lease), reason)

    def open_dial(self, dial: pb.DialIn, gateway: str) -> None:
        """Handle a connection request of a lease holder, or of a user who reads the console."""
        serving = self._duty.serving
        if dial.console:
            lease = dial.lease

            def may_write() -> bool:
                holding = self._duty.serving
                return bool(lease) and holding is not None and holding.lease == lease

            self._console.open_dial(dial, gateway, may_write)
            return
        if serving is not None and serving.lease == dial.lease:
            serving.open_dial(dial, gateway)

    def switch_power(self, request: pb.SwitchPower) -> None:
        """Switch the board's power, or write an image, for a user of the farm."""
        self._power.handle(request)

    def _handle_image(self) -> None:
        """Publish the board's new image. The next job opens a new connection."""
        self._way.mark_changed()
        self._attendance.send_card()

    def _handle_lost_place(self, why: str) -> None:
        """End the running job: another user of labgrid may use the board."""
        if lease := self._running_lease:
            self._lost_lease = lease
            self._work.end(lease, why)

    def print_message(self, text: str) -> None:
        """Print a message for the operator of the host."""
        print(f"{self.post.name}: {text}", file=sys.stderr, flush=True)

    # ---- jobs, in the main thread

    def _inspect_board(self) -> None:
        """Inspect the board. A board that does not respond is presented anyway, and then checked."""
        if self._way.is_borrowed:
            return  # only the owner may access it, and the farm decides the owner
        # The simulator starts at the same time as this process.
        deadline = time.monotonic() + (_START_S if self.post.simulator else 0.0)
        while True:
            try:
                return self._way.refresh()
            except HilError as error:
                if time.monotonic() > deadline:
                    return self.print_message(str(error))
            time.sleep(_LOOK_S)

    def _run_next_job(self) -> None:
        try:
            grant = self._grants.get(timeout=_REST_SECONDS)
        except queue.Empty:
            self._duty.release_resources()
            if self._way.is_borrowed and not self._attendance.owner:
                self._way.close()
            return
        if grant is None:
            return
        self._running_lease = grant.lease
        result = self._work.run(grant.lease, lambda: self._run_job(grant))
        self._running_lease = 0
        if self._work.why:
            result = self._handle_cancelled(grant)
        if result is not None:
            result = self._check_after_job(grant, result)
        if result is not None:
            self._report_result(grant, result)
        self._mark_ended(grant.lease, "done")
        self._attendance.flush_output(grant.lease)

    def _run_job(self, grant: Grant) -> JobResult | None:
        if grant.lease in self._over:
            return None
        too_long = f"time limit of {grant.timeout_s:g} s exceeded"
        late = threading.Timer(grant.timeout_s, self._work.end, [grant.lease, too_long])
        late.daemon = True
        if grant.spec.kind is not Kind.LEASE:
            late.start()
        try:
            return self._duty.do(grant, self._attendance)
        finally:
            late.cancel()

    def _check_after_job(self, grant: Grant, result: JobResult) -> JobResult | None:
        """Check the board after a job that failed or hung. Returns the job's result, or ``BOARD_UNFIT``.

        Returns None if the host stops. The farm then repeats the job.
        """
        if not is_suspicious(grant.spec.kind, result) or grant.lease in self._over:
            return result
        self._attendance.queue_output(grant.lease, f"{result.outcome}: checking whether the board still runs programs")
        key, too_long = _probe_key(grant.lease), f"board check exceeded {PROBE_SECONDS:g} s"
        late = threading.Timer(PROBE_SECONDS, self._work.end, [key, too_long])
        late.daemon = True
        late.start()
        probe = self._work.run(key, lambda: self._duty.probe(grant))
        late.cancel()
        if self._work.why:
            self._close_client()
            if not self._duty.clear_away(grant.fence):
                self._give_up()
            probe = JobResult(EXIT_STAGE, Outcome.TIMEOUT.value, too_long)
        if self._stopping:
            return None
        if grant.lease in self._over:
            return result  # the lease ended during the check
        return result if probe is None else judge_after_probe(result, probe)

    def _handle_cancelled(self, grant: Grant) -> JobResult | None:
        """Return the result of a job cancelled by the farm or the time limit.

        Returns None if the host stops: when the worker leaves, the farm requeues the job without counting the attempt.
        """
        why = self._work.why
        self.print_message(f"job {grant.job} stopped: {why}")
        self._close_client()  # the job may have been cancelled in the middle of a call
        # A frozen holder may keep the session: the fence of the next lease ends it.
        if grant.spec.kind is not Kind.LEASE and not self._duty.clear_away(grant.fence):
            self._give_up()
        if self._stopping:
            return None
        if self._lost_lease == grant.lease:
            return JobResult(EXIT_BOARD, Outcome.BOARD_LOST.value, why, infrastructure=True)
        return JobResult(EXIT_STAGE, Outcome.TIMEOUT.value, why)

    def _report_result(self, grant: Grant, result: JobResult) -> None:
        """Report a job's result, with retries while the lease lasts."""
        self._attendance.send_lines()
        fence = self._way.fence if result.infrastructure else 0
        request = pb.ReportRequest(lease=grant.lease, worker=self.id, result=encode_result(result), fence=fence)
        tries_left = _LAST_TRIES
        while grant.lease not in self._over:
            try:
                # Reporting twice is not an error.
                reply = ask(self.site.uplink, "Report", request, _LAST_S if self._stopping else _REPORT_SECONDS)
            except FarmUnreachable:
                if self._stopping:
                    tries_left -= 1
                if not tries_left:
                    return
                time.sleep(AGAIN_SECONDS)
                continue
            except HilError as error:
                self.print_message(f"the farm rejected the result of job {grant.job}: {error}")
                return
            if not reply.recorded:
                self.print_message(f"the result of job {grant.job} was ignored: {reply.reason}")
            return

    def _get_client(self) -> FarmClient:
        if self._farm is None:
            self._farm = FarmClient(self.site.farm, patience_s=_LEAVE_SECONDS if self._stopping else 30.0)
        return self._farm

    def _close_client(self) -> None:
        farm, self._farm = self._farm, None
        if farm is not None:
            farm.close()

    def _mark_ended(self, lease: int, why: str) -> None:
        with self._lock:
            self._held.discard(lease)
            self._over.setdefault(lease, why)
            while len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)

    def _handle_stop(self, *_: object) -> None:
        self._stopping = True
        self._grants.put(None)
        self._work.end_here(_STOPPED)

    def _give_up(self) -> None:
        """Kill this process group, because a job could not be cancelled."""
        self.print_message("a cancelled job is still running; killing the worker process")
        with contextlib.suppress(OSError):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


def _probe_key(lease: int) -> int:
    """Return the task key of the board check after a lease's job. The key differs from the job's key."""
    return -lease


@contextlib.contextmanager
def redirect_scratch(post: BoardEntry, site: HostInfo) -> Iterator[None]:
    """Redirect temporary files of this process and the children to the board's directory.

    Leftovers of an earlier worker are deleted first. The path is short, because the directory also contains sockets.
    """
    mark = hashlib.sha256(post.name.encode()).hexdigest()[:8]
    folder = str(empty_folder(site.sockets / mark))
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
