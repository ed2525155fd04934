"""Make the cases of a stored suite run again, for new measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.runs import check_seal
from hil.controller.workloads.gate.stored_cases import CaseMissing, read_options
from hil.controller.workloads.suites.cases.sources import choose_flow, open_suite
from hil.controller.workloads.suites.preparing import begin_case, make_suite_runner, resolve_boards
from hil.controller.workloads.suites.request import SuiteRequest
from hil.controller.workloads.suites.store import SuiteRun
from hil.core.results import Artifact
from hil.errors import UsageError


@dataclass
class StoredSuiteCases:
    """Cases of a suite run or of pytest. The suite's source makes the inputs and the references again.

    Args:
        board: name of the board that ran the case.
        folder: empty directory for the files of the cases.
    """

    run: SuiteRun
    board: str
    runner: Runner
    folder: Path

    def __post_init__(self) -> None:
        """Read the request. Raises UsageError if this user did not start the run."""
        head = self.run.head
        check_seal(self.run.folder, head.request)
        self.is_own = True
        with read_options(head.id):
            request = SuiteRequest.from_json(head.request)
        # The stored source may be relative to another directory.
        place = head.place if isinstance(head.place, str) else ""
        self._request = replace(request, source=place or head.source)
        self._flow = choose_flow(request)
        ssh: dict[str, Any] = {
            name: Path(value) if isinstance(value, str) else value for name, value in request.ssh.items()
        }
        choices = zip(request.boards or ("",), resolve_boards(request, self._flow), strict=True)
        named = [given for given, choice in choices if choice.name == self.board]
        self.job = Job(
            (),
            board=named[0] if named else next(iter(request.boards), ""),
            hw_type=request.hw_type,
            runtime=self._flow.runtime,
            device=self._flow.device,
            faults=request.faults,
            **ssh,
        )

    def restore(self, name: str, job: Job, artifact: Artifact) -> Case:
        """Return the case that the suite's source has now. The stored digest shows whether it changed."""
        record = self._find(name)
        suite = open_suite(self._request, self._flow, self.runner.context)
        spec = next((one for one in suite.cases if one.id == name), None)
        if record is None or spec is None:
            raise CaseMissing(f"suite {suite.name} has no case {name}")
        if spec.content != record.content:
            raise CaseMissing(f"the files of case {name} have changed since suite run {self.run.head.id}")
        runner = make_suite_runner(self.runner.context)
        case = begin_case(spec, self._flow, runner, self.folder / self.run.folder.name / name, self._request.settings)
        if case.error is not None:
            raise case.error
        if case.decoder is not None:
            raise UsageError("a generation of a suite cannot be measured again", hint="use hil bench --generate")
        outputs = case.model.outputs if case.model is not None else None
        # Measure a single iteration, profile nothing, and write no files.
        options = replace(case.options, iterations=1, warmup=0, repeat=1, fresh_load=False, recompile=1)
        options = replace(options, profile=False, debug_ir=None, debug_ir_passes=False, recompute=False)
        return replace(case, options=options, artifact=replace(artifact, outputs=outputs))

    def adapt(self, name: str, artifact: Artifact) -> Artifact:
        """Return the program with the stored function."""
        record = self._find(name)
        return artifact if record is None else replace(artifact, function=record.function)

    def _find(self, name: str) -> CaseRecord | None:
        return next((record for record in self.run.read_records() if record.id == name), None)
