"""The host's half of the tests to come, done beside the tests that run: small programs are compiled many at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from hil.controller.models.flows import Flow
from hil.controller.pipeline.runner import Runner
from hil.controller.workloads.suites.case_stages import Settings
from hil.controller.workloads.suites.preparing import prepared
from hil.controller.workloads.suites.spec import CaseSpec
from hil.controller.workloads.suites.store import SuiteRun
from hil.controller.workloads.suites.tasks import Task
from hil.core.boards import BoardConfig

# So many that are ready may wait for their tests: their tensors are in memory.
_WAITING = 256
_JOIN_S = 15.0


class Ahead:
    """Prepares cases in a thread.

    Args:
        specs: the cases, in the order of their tests.
        flow, settings: how they are made.
        runner: takes them through the host's stages.
        config: of the board that they are compiled for.
        run: whose folder takes the cases' files.
    """

    def __init__(
        self,
        specs: Sequence[CaseSpec],
        flow: Flow,
        settings: Settings,
        runner: Runner,
        config: BoardConfig,
        run: SuiteRun,
    ) -> None:
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._coming = {spec.id for spec in specs}
        self._ready: dict[str, Task] = {}
        self._wanted = ""
        self._error: BaseException | None = None
        tasks = prepared(specs, flow, settings, runner, config, run, self._over)
        self._thread = threading.Thread(target=self._work, args=(tasks,), name="hil-ahead", daemon=True)
        self._thread.start()

    def take(self, case_id: str) -> Task | None:
        """A case that is ready, or has ended before; waits for it. None for one that is not among them any more."""
        with self._changed:
            if case_id not in self._coming:
                return None
            self._wanted = case_id
            self._changed.notify_all()
            while case_id not in self._ready:
                if self._error is not None:
                    raise self._error
                # In slices, so that Ctrl-C is heard on every platform.
                self._changed.wait(0.5)
            self._wanted = ""
            self._coming.remove(case_id)
            return self._ready.pop(case_id)

    def close(self) -> None:
        """Prepare no more; to be called after the processes have been stopped."""
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def _work(self, tasks: Iterator[Task]) -> None:
        try:
            for task in tasks:
                with self._changed:
                    self._ready[task.case.name] = task
                    self._changed.notify_all()
                    while len(self._ready) >= _WAITING and not self._wanted and not self._over.is_set():
                        self._changed.wait()
                if self._over.is_set():
                    break
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
