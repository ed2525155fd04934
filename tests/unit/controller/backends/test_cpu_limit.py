from __future__ import annotations

import signal
import time

import pytest

from hil.controller.backends.references.runners.cpu_limit import limit_cpu
from hil.errors import ReferenceTooSlow


def test_cpu_limit_ends_busy_code_catching_errors() -> None:
    before = signal.getsignal(signal.SIGPROF)
    with pytest.raises(ReferenceTooSlow, match=r"more than 0\.05 s of CPU time"), limit_cpu(0.05):
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue
    assert signal.getsignal(signal.SIGPROF) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_cpu_limit_ignores_waiting_time() -> None:
    with limit_cpu(0.2):
        time.sleep(0.4)


def test_cpu_limit_accepts_none() -> None:
    with limit_cpu(None):
        assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
