"""What a board's worker does with a board that was granted: taken by the lease's fence, used, given back."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.farm import telemetry
from hil.controller.farm.client import FarmClient
from hil.controller.farm.host.board_connection import BoardConnection
from hil.controller.farm.host.gateway_stream import GatewayStream
from hil.controller.farm.host.inventory import HostInfo
from hil.controller.farm.host.tunnel_endpoint import LeaseGuard, TunnelEndpoint
from hil.controller.farm.messages import Grant, JobResult, Kind
from hil.controller.storage.isolated import Isolated
from hil.core.results import Outcome
from hil.core.scratch import remove_tree
from hil.errors import EXIT_BOARD, EXIT_OK, EXIT_STAGE, BoardError, HilError, StorageError, UsageError

_FREE_S = 3.0
_LOOK_S = 0.05
_LONG_S = 10 * 366 * 86400.0
# So much of what went wrong is kept.
REASON = 500
# What a value of the wrong type or size in a job's options ends in, wherever that is found out: no board is blamed for
# it, and no other one tried.
_JOBS_OWN = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Attempt:
    """What one attempt at a job has: its grant, the board that was taken for it, and what its host lends."""

    grant: Grant  # its ``trace`` is the attempt's span
    board: BoardChoice  # by the lease's fence
    runtime: str  # the board's first
    site: HostInfo
    folder: Path  # an empty one of its own
    print: Callable[[str], None]
    case_ended: Callable[[str, str, str], None]  # told of each case: its name, outcome and reason
    isolated: Isolated  # outlives it
    farm: Callable[[], FarmClient]
    timings: dict[str, float]  # seconds of each step, filled as they end

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Time a step."""
        begin = time.monotonic()
        try:
            with telemetry.span(step, self.grant.trace):
                yield
        finally:
            self.timings[step] = time.monotonic() - begin


class LeaseRunner:
    """Does what a board is given; in the main thread. ``workers`` processes may compile at a time.

    ``use`` does a job on the board that was taken for it.
    """

    def __init__(
        self, way: BoardConnection, farm: Callable[[], FarmClient], workers: int, use: Callable[[Attempt], JobResult]
    ) -> None:
        self.way, self._farm, self._workers, self._use_board = way, farm, workers, use
        self._isolated: Isolated | None = None
        self.serving: TunnelEndpoint | None = None  # the lease that somebody holds now

    def do(self, grant: Grant, attendance: GatewayStream) -> JobResult:
        """Do a job; what fails is its result."""
        begun, timings = time.monotonic_ns(), dict[str, float]()

        def tell(text: str) -> None:
            attendance.printed(grant.lease, text)

        def ended(name: str, outcome: str, reason: str) -> None:
            attendance.case_ended(grant.lease, name, outcome, reason[:REASON])

        with telemetry.span("job", grant.trace, job=grant.job, board=grant.board, attempt=grant.attempt) as span:
            try:
                before = self.way.card()
                with telemetry.span("open", span.traceparent):
                    self._take(grant, tell)
                timings["open"] = (time.monotonic_ns() - begun) / 1e9
                begun = time.monotonic_ns()
                with self._served(grant):
                    attendance.started(grant.lease, self.serving.address if self.serving else "")
                    if replace(self.way.card(), fence=before.fence) != before:
                        attendance.present()
                    result = self._use(replace(grant, trace=span.traceparent), tell, ended, timings)
            except Exception as error:
                if not isinstance(error, HilError):
                    print(f"job {grant.job}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                result = failed(error)
            finally:
                self.way.release()
            span.set(exit_code=result.exit_code, outcome=result.outcome)
        return replace(result, timings=timings, board_ns=(begun, time.monotonic_ns()))

    def clear_away(self, fence: int) -> bool:
        """After a job that was ended: see to it that nothing of it is left; whether that is so."""
        self.rest()
        deadline = time.monotonic() + _FREE_S
        try:
            while True:
                # Asked first: who is stopped between the two looks at the board once more.
                late = time.monotonic() > deadline
                if not self.way.is_held(fence):
                    return True
                if late:
                    return False
                time.sleep(_LOOK_S)
        except HilError:
            self.way.close()
            return True

    def rest(self) -> None:
        """Keep nothing ready."""
        if self._isolated is not None:
            self._isolated.close()
            self._isolated = None

    def _take(self, grant: Grant, tell: Callable[[str], None]) -> None:
        try:
            if grant.spec.kind is Kind.HEALTH:
                self.way.revive(int(grant.spec.options.get("failures", 0)), tell)
            self.way.take(grant)
            if self.way.bring(str(grant.spec.options.get("needs", "")), tell):
                self.way.take(grant)
        except UsageError as error:
            # The board's config is wrong, or a file of it: that is no fault of the job's.
            raise BoardError(error.message, board=self.way.post.name, hint=error.hint) from error

    def _use(
        self,
        grant: Grant,
        tell: Callable[[str], None],
        ended: Callable[[str, str, str], None],
        timings: dict[str, float],
    ) -> JobResult:
        """The board is ours: use it."""
        if grant.spec.kind is Kind.LEASE:
            # Somebody has the board, until the lease is over: that ends this as it ends any job.
            time.sleep(min(grant.timeout_s, _LONG_S))
            return JobResult(EXIT_OK, reason="its time is over")
        folder = emptied(self.way.post.folder / "job")
        way, board = self.way, self.way.choice(grant)
        lent = way.config.runtime, way.site, folder, tell, ended, self._pool(), self._farm, timings
        try:
            return self._use_board(Attempt(grant, board, *lent))
        finally:
            remove_tree(folder)

    @contextlib.contextmanager
    def _served(self, grant: Grant) -> Iterator[None]:
        """Connections of whoever holds the board are led to it, from before anybody is told that it is there."""
        if grant.spec.kind is not Kind.LEASE:
            yield
            return
        target = self.way.target
        if target is None or target.token:
            why = "its agent asks for a token, which is its host's alone" if target else "it has no agent"
            raise UsageError(f"nobody can hold {grant.board}: {why}", hint="a selector that leaves it out")
        self.way.release()
        guard = LeaseGuard(target, grant.fence, self.way.site.sockets / f"lease-{grant.lease}.sock")
        self.serving = TunnelEndpoint(grant.lease, guard.address, self.way.site.farm, self.way.say)
        try:
            yield
        finally:
            self.serving.close()
            self.serving = None
            guard.close()

    def _pool(self) -> Isolated:
        if self._isolated is None or self._isolated.closed:
            self._isolated = Isolated(self._workers)
        return self._isolated


def emptied(folder: Path) -> Path:
    """The folder, made anew."""
    remove_tree(folder)
    folder.mkdir(parents=True)
    return folder


def failed(error: HilError | Exception) -> JobResult:
    """The result of an attempt that raised an error."""
    if isinstance(error, UsageError) and not isinstance(error, StorageError):
        return JobResult(error.exit_code, reason=_error_text(error))
    if isinstance(error, _JOBS_OWN) and not isinstance(error, HilError):
        return JobResult(EXIT_STAGE, Outcome.RUN_ERROR.value, _error_text(error))
    code = error.exit_code if isinstance(error, BoardError) else EXIT_BOARD
    outcome = error.outcome if isinstance(error, BoardError) else BoardError.outcome
    return JobResult(code, outcome or "", _error_text(error), infrastructure=True)


def _error_text(error: HilError | Exception) -> str:
    if not isinstance(error, HilError):
        return f"{type(error).__name__}: {error}"[:REASON]
    return f"{error.message}; {error.hint}"[:REASON] if error.hint else error.message[:REASON]
