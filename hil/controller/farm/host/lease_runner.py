"""Run granted jobs on a board: open a session with the lease's fence, use the board, close the session."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.power_control.recovery import recover_board
from hil.controller.farm import telemetry
from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.client.lease_session import describe_lease
from hil.controller.farm.host.board_connection import BoardConnection
from hil.controller.farm.host.gateway_link.gateway_stream import GatewayStream
from hil.controller.farm.host.inventory import HostInfo, format_leased_config, get_guard_path
from hil.controller.farm.host.other_boards import make_file_name, serve_other_boards
from hil.controller.farm.host.tunnel_endpoint import LeaseGuard, TunnelEndpoint
from hil.controller.farm.messages import Grant, JobResult, JobSpec, Kind
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.crash import report_crash
from hil.core.results import Outcome
from hil.core.scratch import remove_tree
from hil.core.text import TextSink
from hil.errors import (
    EXIT_BOARD,
    EXIT_INTERNAL,
    EXIT_OK,
    BoardError,
    BoardLost,
    BoardUnfit,
    HilError,
    StorageError,
    UsageError,
)

_FREE_SECONDS = 3.0
_LOOK_SECONDS = 0.05
_LONG_SECONDS = 10 * 366 * 86400.0
# Maximum length of an error text.
REASON = 500
# Python errors, often caused by a job option with a wrong type or size. They do not count as errors of the board, and
# hil does not retry the job on another board.
_JOBS_OWN = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Attempt:
    """Inputs of one attempt at a job: grant, board and host resources."""

    grant: Grant  # ``trace`` is the attempt's span
    board: BoardChoice  # with the lease's fence
    runtime: str  # the board's default runtime
    site: HostInfo
    folder: Path  # empty directory for this attempt
    print: Callable[[str], None]
    case_ended: Callable[[str, str, str], None]  # called for each finished case with name, outcome and reason
    isolated: Isolated  # reused by later attempts
    farm: Callable[[], FarmClient]
    timings: dict[str, float]  # seconds per finished step
    # For commands: config file of the leased board, and the address in the board's own config.
    config: Path | None = None
    address: str = ""
    other_configs: tuple[Path, ...] = ()  # the same for the boards after the first

    @contextlib.contextmanager
    def measure_step(self, step: str) -> Iterator[None]:
        """Measure the duration of a step."""
        begin = time.monotonic()
        try:
            with telemetry.record_span(step, self.grant.trace):
                yield
        finally:
            self.timings[step] = time.monotonic() - begin


class LeaseRunner:
    """Runs the jobs of a board in the main thread.

    Args:
        workers: number of processes that may compile concurrently.
        use: runs a job on the board.
    """

    def __init__(
        self, way: BoardConnection, farm: Callable[[], FarmClient], workers: int, use: Callable[[Attempt], JobResult]
    ) -> None:
        self.way, self._farm, self._workers, self._use_board = way, farm, workers, use
        self._isolated: Isolated | None = None
        self.serving: TunnelEndpoint | None = None  # endpoint of the interactive lease, if any

    def probe(self, grant: Grant) -> JobResult:
        """Check the board with a health job, within the lease of a failed job."""
        check = replace(grant, spec=JobSpec(Kind.HEALTH))
        try:
            self.way.take(grant)
            return self._run_on_board(check, lambda text: None, lambda name, outcome, reason: None, {})
        except Exception as error:
            return make_failed_result(error)
        finally:
            self.way.release()

    def do(self, grant: Grant, attendance: GatewayStream) -> JobResult:
        """Run a job. Errors become results."""
        timings: dict[str, float] = {}
        begun = time.monotonic_ns()

        def report_output(text: str) -> None:
            attendance.queue_output(grant.lease, text)

        def report_case(name: str, outcome: str, reason: str) -> None:
            attendance.queue_case(grant.lease, name, outcome, reason[:REASON])

        def run_attempt() -> JobResult:
            nonlocal begun
            try:
                before = self.way.read_card()
                with telemetry.record_span("open", span.traceparent):
                    self._take_board(grant, report_output)
                timings["open"] = (time.monotonic_ns() - begun) / 1e9
                begun = time.monotonic_ns()
                with self._serve_holder(grant):
                    # Before the start: the holder of a lease gets the card with the board's current stack.
                    if self.way.read_card().replace(fence=before.fence) != before:
                        attendance.send_card()
                    attendance.report_start(grant.lease, self.serving.address if self.serving else "")
                    return self._run_on_board(
                        replace(grant, trace=span.traceparent), report_output, report_case, timings
                    )
            except Exception as error:
                if not isinstance(error, HilError):
                    print(f"job {grant.job}: {report_crash(error)}", file=sys.stderr, flush=True)
                return make_failed_result(error)
            finally:
                self.way.release()

        with telemetry.record_span("job", grant.trace, job=grant.job, board=grant.board, attempt=grant.attempt) as span:
            result = (
                self._check_with_recovery(run_attempt, report_output)
                if grant.spec.kind is Kind.HEALTH
                else run_attempt()
            )
            span.set(exit_code=result.exit_code, outcome=result.outcome)
        return result.replace(timings=timings, board_ns=(begun, time.monotonic_ns()))

    def _check_with_recovery(self, check: Callable[[], JobResult], tell: TextSink) -> JobResult:
        """Check the board. While the check fails, run the next configured recovery step and repeat the check."""
        results: list[JobResult] = []

        def find_fault() -> HilError | None:
            if results:
                # A step may have restarted the board.
                self.way.hang_up()
            results.append(check())
            return make_check_error(results[-1])

        recovery = recover_board(BoardChoice(self.way.config), find_fault, say=tell)
        if not recovery.steps or results[-1].outcome == Outcome.BOARD_BUSY.value:
            return results[-1]
        if recovery.is_working:
            problem = recovery.problem.message if recovery.problem else ""
            return results[-1].replace(reason=f"recovered by {recovery.steps[-1].name}: {problem}"[:REASON])
        tried = ", ".join(step.name for step in recovery.steps)
        return results[-1].replace(reason=f"{results[-1].reason or results[-1].outcome}; tried {tried}"[:REASON])

    def clear_away(self, fence: int) -> bool:
        """Release all resources of a cancelled job. Returns True if the session has ended."""
        self.release_resources()
        deadline = time.monotonic() + _FREE_SECONDS
        try:
            while True:
                # Read the clock before the check. If this process is suspended in between, it checks the board a second
                # time.
                late = time.monotonic() > deadline
                if not self.way.is_held(fence):
                    return True
                if late:
                    return False
                time.sleep(_LOOK_SECONDS)
        except HilError:
            self.way.close()
            return True

    def release_resources(self) -> None:
        """Release resources prepared for the next job."""
        if self._isolated is not None:
            self._isolated.close()
            self._isolated = None

    def _take_board(self, grant: Grant, tell: Callable[[str], None]) -> None:
        try:
            self.way.take(grant)
            if self.way.deploy_runtime(str(grant.spec.options.get("needs", "")), tell):
                self.way.take(grant)
            if grant.spec.kind in (Kind.LEASE, Kind.HEALTH):
                self.way.read_stack()
        except UsageError as error:
            # The board's config or one of its files is invalid, so report a board error, not a job error.
            raise BoardError(error.message, board=self.way.post.name, hint=error.hint) from error

    def _run_on_board(
        self,
        grant: Grant,
        tell: Callable[[str], None],
        ended: Callable[[str, str, str], None],
        timings: dict[str, float],
    ) -> JobResult:
        """Run the job on the board. The session must be open."""
        if grant.spec.kind is Kind.LEASE:
            # The holder uses the board until the lease ends, which interrupts this sleep.
            time.sleep(min(grant.timeout_s, _LONG_SECONDS))
            return JobResult(EXIT_OK, reason="time limit reached")
        folder = empty_folder(self.way.post.folder / "job")
        way, board = self.way, self.way.choice(grant)
        lent = way.config.runtime, way.site, folder, tell, ended, self._get_pool(), self._farm, timings
        try:
            with (
                self._serve_command(grant, folder) as config,
                serve_other_boards(grant, folder / "board", way.site, self._farm, tell) as others,
            ):
                address = way.config.connection.address if config else ""
                own: dict[str, Any] = {"config": config, "address": address, "other_configs": others}
                return self._use_board(Attempt(grant, board, *lent, **own))
        finally:
            remove_tree(folder)

    @contextlib.contextmanager
    def _serve_command(self, grant: Grant, folder: Path) -> Iterator[Path | None]:
        """Yield the config file with which a command can use the board; None for other jobs.

        A board without an agent has no fences, so commands use the board's own config.
        """
        if grant.spec.kind is not Kind.COMMAND:
            yield None
            return
        (folder / "board").mkdir()
        target = self.way.target
        if target is None:
            yield self.way.post.config
            return
        self.way.release()
        with self._open_guard(target, grant) as address:
            name = make_file_name(grant.board) if grant.more else grant.board
            config = folder / "board" / f"{name}.toml"
            card = self.way.read_card()
            lease = describe_lease(card, grant)
            config.write_text(format_leased_config(self.way.config, address, grant.fence, lease, card.image))
            yield config

    @contextlib.contextmanager
    def _open_guard(self, target: AgentEndpoint, grant: Grant) -> Iterator[str]:
        """Yield the address of a guard that gives access to the agent with the lease's fence."""
        if target.token:
            raise UsageError(
                f"{grant.board} cannot be leased: the agent requires a token that only the host has",
                hint="use a selector that excludes the board",
            )
        guard = LeaseGuard(target, grant.fence, get_guard_path(self.way.site, grant.lease))
        try:
            yield guard.address
        finally:
            guard.close()

    @contextlib.contextmanager
    def _serve_holder(self, grant: Grant) -> Iterator[None]:
        """Serve the holder's connections to an interactive lease. Starts before the board is reported as ready."""
        if grant.spec.kind is not Kind.LEASE:
            yield
            return
        target = self.way.target
        if target is None:
            raise UsageError(
                f"{grant.board} cannot be leased: it has no agent", hint="use a selector that excludes the board"
            )
        self.way.release()
        with self._open_guard(target, grant) as address:
            self.serving = TunnelEndpoint(grant.lease, address, self.way.site.farm, self.way.say)
            try:
                yield
            finally:
                self.serving.close()
                self.serving = None

    def _get_pool(self) -> Isolated:
        if self._isolated is None or self._isolated.closed:
            self._isolated = Isolated(self._workers)
        return self._isolated


def empty_folder(folder: Path) -> Path:
    """Return an empty directory at this path."""
    remove_tree(folder)
    folder.mkdir(parents=True)
    return folder


def make_check_error(check: JobResult) -> HilError | None:
    """Return the error of a failed check: BoardLost for a silent board, otherwise BoardUnfit.

    A board in use by others has no fault: a recovery step, such as a power cycle, would disturb its user.
    """
    if check.exit_code == EXIT_OK or check.outcome == Outcome.BOARD_BUSY.value:
        return None
    silent = (Outcome.BOARD_LOST.value, Outcome.BOARD_UNREACHABLE.value)
    kind = BoardLost if check.outcome in silent else BoardUnfit
    return kind(check.reason or check.outcome)


def make_failed_result(error: HilError | Exception) -> JobResult:
    """Return the result for an attempt that raised an error."""
    if isinstance(error, UsageError) and not isinstance(error, StorageError):
        return JobResult(error.exit_code, reason=_format_error(error))
    if isinstance(error, _JOBS_OWN) and not isinstance(error, HilError):
        return JobResult(EXIT_INTERNAL, reason=_format_error(error))
    code = error.exit_code if isinstance(error, BoardError) else EXIT_BOARD
    outcome = error.outcome if isinstance(error, BoardError) else BoardError.outcome
    return JobResult(code, outcome or "", _format_error(error), infrastructure=True)


def _format_error(error: HilError | Exception) -> str:
    if not isinstance(error, HilError):
        return f"{type(error).__name__}: {error}"[:REASON]
    return f"{error.message}; {error.hint}"[:REASON] if error.hint else error.message[:REASON]
