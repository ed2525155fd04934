"""Sample a power sensor of the board in a thread, and yield the samples for a client."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from hil.core.clock import get_time_ns
from hil.core.power_sensor import MAX_RATE_HZ, MIN_RATE_HZ, SENSOR_KINDS, PowerSensor, open_sensor
from hil.errors import BoardUnfit, UsageError
from hil.protocol.v1 import agent_pb2 as pb

# Samples that wait for a slow client. Further samples are lost.
MAX_WAITING_SAMPLES = 20_000
# Samples in a message: at most 37 KiB.
_MAX_SENT = 2048
# Interval for sending samples, and for noticing the end of the call.
_SEND_SECONDS = 0.1
_END_SECONDS = 1.0


class PowerSampler:
    """Samples of a sensor at a fixed rate. Use as a context manager, which stops the thread."""

    def __init__(self, sensor: PowerSensor, rate_hz: float) -> None:
        self._sensor = sensor
        self._period_ns = round(1e9 / rate_hz)
        self._waiting: deque[tuple[int, float]] = deque()
        self._lost = 0
        self._problem = ""
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._collect, daemon=True, name="hil-power")

    def __enter__(self) -> PowerSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join(_END_SECONDS)

    def take(self) -> pb.PowerSamples:
        """Return the oldest samples that were not returned before. Raises BoardUnfit if reading failed."""
        problem = self._problem
        count = min(len(self._waiting), _MAX_SENT)
        if problem and not count:
            raise BoardUnfit(f"reading the sensor failed: {problem}")
        taken = [self._waiting.popleft() for _ in range(count)]
        return pb.PowerSamples(
            clock_ns=[at for at, _ in taken],
            values=[value for _, value in taken],
            counts_energy=self._sensor.counts_energy,
            lost=self._lost,
        )

    def _collect(self) -> None:
        due, last = get_time_ns(), 0
        while not self._leaving.wait(max(due - get_time_ns(), 0) / 1e9):
            before = get_time_ns()
            try:
                value = self._sensor.read_value()
            except (OSError, ValueError) as error:
                self._problem = str(getattr(error, "strerror", None) or error)
                return
            # The kernel took the value between the two times.
            at = (before + get_time_ns()) // 2
            if len(self._waiting) >= MAX_WAITING_SAMPLES:
                self._lost += 1
            elif at > last:
                self._waiting.append((at, value))
                last = at
            # After a pause of this process, continue from now instead of sampling in a burst.
            due = max(due + self._period_ns, get_time_ns())


def list_meters() -> list[str]:
    """Return the kinds of meters that the agent reads, for Describe."""
    return list(SENSOR_KINDS)


def stream_power(request: pb.PowerRequest, is_wanted: Callable[[], bool]) -> Iterator[pb.PowerSamples]:
    """Yield the samples of a sensor as long as they are wanted.

    Raises:
        UsageError: the rate is out of range.
        BoardUnfit: the sensor is missing or unreadable.
    """
    if not MIN_RATE_HZ <= request.rate_hz <= MAX_RATE_HZ:
        raise UsageError(f"the sample rate must be from {MIN_RATE_HZ:g} to {MAX_RATE_HZ:g} Hz")
    try:
        sensor = open_sensor(request.kind, request.path, request.channel)
    except UsageError as error:
        raise error.as_kind(BoardUnfit) from error
    pause = threading.Event()
    with PowerSampler(sensor, request.rate_hz) as sampler:
        while is_wanted():
            found = sampler.take()
            yield found
            if len(found.values) < _MAX_SENT:
                pause.wait(_SEND_SECONDS)
