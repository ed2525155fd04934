"""A worker's stream to a gateway. Reconnects after failures."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hil.controller.farm.host.gateway_link.uplink_call import UplinkCall
from hil.controller.farm.messages import BoardCard, Grant
from hil.controller.farm.rpc import decode_grant, encode_card
from hil.core.text import replace_surrogates
from hil.errors import AccessRefused, FarmUnreachable, HilError, VersionMismatch
from hil.protocol.v1 import farm_pb2 as pb

# Default and allowed range of the heartbeat interval. Intervals outside the range are replaced by the default.
_BEAT_S, _BEATS_S = 1.5, (0.01, 600.0)
# A gateway that does not reply for this many heartbeats plus a margin is lost. The margin doubles up to a limit, in
# case all gateways are slow.
_SILENT_BEATS, _SILENT_S, _SLOW_S = 3, 3.0, 60.0
_AGAIN_SECONDS = (0.1, 2.0)
# Retry interval after a refusal, which only an operator can resolve.
_REFUSED_SECONDS = 10.0
# The worker sends lines in batches. While disconnected, the worker keeps only the last lines.
_GATHER_SECONDS = 0.2
_MAX_LINES = 2000


class _Listener(Protocol):
    """Receiver of the farm's messages. Called by threads of the stream; implementations must return quickly."""

    def get_card(self) -> BoardCard: ...
    def list_leases(self) -> list[int]: ...  # running and waiting leases
    def queue_grant(self, grant: Grant) -> None: ...  # may repeat
    def cancel_lease(self, lease: int, reason: str) -> None: ...
    def open_dial(self, dial: pb.DialIn, gateway: str) -> None: ...  # gateway: the connected one
    def switch_power(self, request: pb.SwitchPower) -> None: ...
    def print_message(self, text: str) -> None: ...  # message for the operator of the host


class GatewayStream:
    """Presents a board to the farm, sends heartbeats and forwards messages."""

    def __init__(self, uplink: Path, worker: str, listener: _Listener) -> None:
        self._uplink, self._worker, self._listener = uplink, worker, listener
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._outgoing: queue.SimpleQueue[pb.FromBoard | None] | None = None
        self._started: dict[int, str] = {}
        self._lines: dict[int, list[str]] = {}
        self._cases: dict[int, list[pb.CaseEnded]] = {}
        self._wake = threading.Event()
        self._beat_s = _BEAT_S
        self._heard_at = time.monotonic()
        self._silent_s = _SILENT_S
        self._is_silent = False
        self._cancel: Callable[[], object] = lambda: None
        self._begun = False
        self._problem = ""  # last reported connection problem
        self.owner = False  # True for the owner, False for a standby worker
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._run_stream, self._send_beats)]

    def start(self) -> bool:
        """Start the threads. Returns False if the threads were started before."""
        with self._lock:
            first, self._begun = not self._begun, True
        if first:
            for thread in self._threads:
                thread.start()
        return first

    def close(self, wait_s: float = 2.0) -> None:
        """Leave the farm. The farm then sets the board offline."""
        self._closed.set()
        self.send_lines()
        self._queue_message(None)
        self._wake.set()
        if self._begun:
            self._threads[0].join(wait_s)
        self._cancel()

    def send_card(self) -> None:
        """Send the board's changed description to the farm."""
        self._queue_message(self._build_hello())

    def report_start(self, lease: int, direct: str) -> None:
        """Report that a job's board session is open."""
        with self._lock:
            self._started[lease] = direct
            if self._outgoing is not None:
                self._outgoing.put(_make_started_message(lease, direct))

    def queue_output(self, lease: int, text: str) -> None:
        """Queue a line of a job's output."""
        with self._lock:
            lines = self._lines.setdefault(lease, [])
            lines.append(replace_surrogates(text))
            del lines[:-_MAX_LINES]
        self._wake.set()

    def queue_case(self, lease: int, *told: str) -> None:
        """Queue the name, outcome and reason of a finished case."""
        name, outcome, reason = map(replace_surrogates, told)
        with self._lock:
            cases = self._cases.setdefault(lease, [])
            cases.append(pb.CaseEnded(name=name, outcome=outcome, reason=reason))
            del cases[:-_MAX_LINES]
        self._wake.set()

    def report_power(self, id: str, error: str) -> None:
        """Report the end of a power action. The gateway asks again if the report is lost."""
        self._queue_message(pb.FromBoard(switched=pb.Switched(id=id, error=replace_surrogates(error))))

    def flush_output(self, lease: int) -> None:
        """Send the remaining output of a lease's job."""
        self.send_lines()
        with self._lock:
            self._started.pop(lease, None)

    # ---- the stream

    def _run_stream(self) -> None:
        pause = _AGAIN_SECONDS[0]
        while not self._closed.is_set():
            began, refused = time.monotonic(), False
            try:
                self._exchange_messages()
                problem = "the gateway closed the connection; retrying"
            except HilError as error:
                refused = isinstance(error, (AccessRefused, VersionMismatch)) and not self._is_silent
                problem = "the gateway does not respond; retrying" if self._is_silent else _format_error(error)
            except Exception as error:  # invalid message; a different gateway may send valid ones
                problem = f"{type(error).__name__}: {error}; retrying"
            self.owner = False
            if time.monotonic() - began > 2 * _AGAIN_SECONDS[1]:
                pause = _AGAIN_SECONDS[0]
            if problem != self._problem and not self._closed.is_set():
                self._problem = problem
                self._listener.print_message(problem)
            self._closed.wait(_REFUSED_SECONDS if refused else pause)
            pause = min(pause * 2, _AGAIN_SECONDS[1])

    def _exchange_messages(self) -> None:
        self._is_silent = False
        outgoing: queue.SimpleQueue[pb.FromBoard | None] = queue.SimpleQueue()
        stream = UplinkCall(self._uplink, "Attend")
        self._cancel = stream.cancel
        self._heard_at = time.monotonic()
        sending = threading.Thread(target=_send_all, args=(outgoing, stream), daemon=True)
        sending.start()
        try:
            # Atomic: no message can get between the initial state and later changes.
            with self._lock:
                outgoing.put(self._build_hello())
                for lease, direct in self._started.items():
                    outgoing.put(_make_started_message(lease, direct))
                self._outgoing = outgoing
            if self._closed.is_set():
                outgoing.put(None)
            self._wake.set()
            for message in stream.iter_replies():
                self._heard_at = time.monotonic()
                self._dispatch_message(message, stream.gateway)
        finally:
            with self._lock:
                self._outgoing = None
            # Unblock the sending thread.
            outgoing.put(None)
            stream.cancel()
            sending.join()
            stream.close()

    def _dispatch_message(self, message: pb.ToBoard, gateway: str) -> None:
        kind = message.WhichOneof("kind")
        if kind == "beat":
            self._silent_s = _SILENT_S
        elif kind == "standing":
            self.owner = message.standing.owner
            beat_s = message.standing.beat_s
            self._beat_s = beat_s if _BEATS_S[0] <= beat_s <= _BEATS_S[1] else _BEAT_S
            if self._problem:
                self._problem = ""
                self._listener.print_message("reconnected to the farm")
        elif kind == "grant":
            self._listener.queue_grant(decode_grant(message.grant))
        elif kind == "ended":
            with self._lock:
                self._started.pop(message.ended.lease, None)
            self._listener.cancel_lease(message.ended.lease, message.ended.reason)
        elif kind == "dial":
            self._listener.open_dial(message.dial, gateway)
        elif kind == "power":
            self._listener.switch_power(message.power)

    def _build_hello(self) -> pb.FromBoard:
        card = encode_card(self._listener.get_card())
        return pb.FromBoard(hello=pb.Hello(card=card, worker=self._worker, leases=self._listener.list_leases()))

    def _queue_message(self, message: pb.FromBoard | None) -> bool:
        with self._lock:
            if self._outgoing is None:
                return False
            self._outgoing.put(message)
            return True

    # ---- heartbeats, in a separate thread

    def _send_beats(self) -> None:
        due = time.monotonic()
        while not self._closed.is_set():
            if self._wake.wait(max(due - time.monotonic(), 0.0)):
                self._wake.clear()
                self._closed.wait(min(_GATHER_SECONDS, max(due - time.monotonic(), 0.0)))
                self.send_lines()
            if time.monotonic() < due:
                continue
            due = compute_next_beat(time.monotonic(), self._beat_s)
            sent = self._queue_message(pb.FromBoard(beat=pb.BoardBeat(leases=self._listener.list_leases())))
            if sent and time.monotonic() - self._heard_at > _SILENT_BEATS * self._beat_s + self._silent_s:
                self._is_silent, self._silent_s = True, min(2 * self._silent_s, _SLOW_S)
                self._cancel()

    def send_lines(self) -> None:
        """Send queued output and finished cases now."""
        with self._lock:
            if self._outgoing is None:
                return
            for lease in {**self._lines, **self._cases}:
                text = "".join(f"{line}\n" for line in self._lines.get(lease, ()))
                printed = pb.Printed(lease=lease, text=text, cases=self._cases.get(lease, ()))
                self._outgoing.put(pb.FromBoard(printed=printed))
            self._lines.clear()
            self._cases.clear()


def _send_all(outgoing: queue.SimpleQueue[pb.FromBoard | None], stream: UplinkCall) -> None:
    """Send queued messages. None ends the stream. The reader detects a broken stream."""
    with contextlib.suppress(FarmUnreachable):
        for message in iter(outgoing.get, None):
            stream.send(message)
        stream.send(None)


def compute_next_beat(now: float, every_s: float) -> float:
    """Return the time of the next heartbeat. All workers of a host send together, which reduces the cost to a fifth."""
    return (now // every_s + 1) * every_s


def _make_started_message(lease: int, direct: str) -> pb.FromBoard:
    return pb.FromBoard(started=pb.Started(lease=lease, direct=direct))


def _format_error(error: HilError) -> str:
    """Format an error for the operator. Temporary errors have no hint."""
    hint = f"\n  hint: {error.hint}" if error.hint and not isinstance(error, FarmUnreachable) else ""
    return f"{error.message.removesuffix('.')}; retrying{hint}"
