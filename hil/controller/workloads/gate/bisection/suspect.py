"""Make cases for a suspect: from another model file, from the judged model, or from the judged program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hil.controller.models.inputs import fix_sizes
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.restored import restore_references
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.model_settings import apply_model_settings
from hil.controller.pipeline.settings.options import Job, Options
from hil.controller.pipeline.stages import choose_board
from hil.controller.records.decisions.gate import GateVerdict
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.records.run import RunCase
from hil.controller.storage.outcomes import exit_code_for
from hil.controller.workloads.gate.plan import GateCase
from hil.controller.workloads.gate.programs import ProgramRestorer
from hil.controller.workloads.gate.stored_cases import StoredRunCases
from hil.core.compile_flags import is_safe_flag
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.errors import BoardError, UsageError


@dataclass
class SuspectRun:
    """The judged run of a suspect.

    Attributes:
        case: the suspect. The history may contain the program that passed before.

    Raises:
        UsageError: the suspect cannot be measured again.
    """

    restorer: ProgramRestorer
    runner: Runner
    pool: BoardPool
    case: GateCase
    verdict: GateVerdict

    def __post_init__(self) -> None:
        cases = self.restorer.opener.open(self.case.new)
        if not isinstance(cases, StoredRunCases):
            raise UsageError("--bisect does not support suites", hint="measure the model with hil bench")
        self._cases, self._run = cases, cases.run
        self._job: Job = self.restorer.choose_job(cases)
        if self._job.generate is not None:
            raise UsageError("--bisect does not support --generate")
        self._choice = choose_board(self._job)

    @property
    def board(self) -> str:
        """Name of the board that tests the candidates."""
        return self._choice.name

    @property
    def is_broken(self) -> bool:
        """Whether the new program fails. Otherwise it is slower."""
        return is_failing(self.verdict)

    @property
    def is_compared(self) -> bool:
        """Whether outputs are compared with references, as in the stored run."""
        return self.case.new.outcome != Outcome.SKIP.value

    def begin(self, model: Path, locate: Callable[[str], str], folder: Path) -> Case:
        """Import another version of the model, with the options of the judged run.

        Args:
            model: the model's file.
            locate: returns a new text for a value of ``--input`` or ``--expected``.
            folder: directory for logs.

        Raises:
            UsageError: a file is missing, or the model does not match the options.
        """
        options = self._options
        if isinstance(options.expected, Mapping):
            raise UsageError("--bisect does not support expected outputs that were passed as Python arrays")
        inputs = options.inputs
        options = replace(
            options,
            inputs=self._run.load_tensors(self._stored.inputs)
            if isinstance(inputs, Mapping)
            else tuple(map(locate, inputs)),
            expected=tuple(map(locate, options.expected)),
        )
        return self.runner.begin(model, options, folder, name=self.case.new.case, want_inputs=self.is_compared)

    def begin_judged(self, folder: Path) -> Case:
        """Import the judged model, with the stored inputs and references.

        Raises:
            UsageError: the model's file changed or is missing, the run has no inputs, or the run has compiler flags of
                another user, which can run commands.
        """
        stored, options = self._stored, self._options
        if not stored.inputs:
            raise UsageError(f"run {self._run.id} has no inputs for case {stored.name}")
        if options.compile_flags and not self._cases.is_own:
            raise UsageError(
                f"cannot trust the compiler flags of run {self._run.id}: this user did not start it in this directory",
                hint="measure the commit again",
            )
        case = self.runner.begin(Path(stored.path), options, folder, name=self.case.new.case, want_inputs=False)
        if case.model is None:
            return case
        if stored.model is None or case.model.digest != stored.model.digest:
            raise UsageError(
                f"{stored.path} differs from the model of {self._run.id}",
                hint="check out the judged commit, and build the model",
            )
        inputs = self._run.load_tensors(stored.inputs)
        return replace(
            case,
            model=fix_sizes(case.model, inputs) if case.model.inputs is not None else case.model,
            inputs=inputs,
            references=restore_references(self._run, stored),
        )

    def restore_judged(self) -> Case:
        """Return the judged program with its inputs and references. Raises UsageError if it is not in the history."""
        return self.restorer.restore_entry(self._cases, self.case.new, self.case.new, self._job)

    def check_flags(self, flags: Sequence[str]) -> None:
        """Raise UsageError if another user chose a compiler flag that may write files or start programs.

        Any user can write entries of a history, so only the records of this user's own runs count.
        """
        if all(map(is_safe_flag, flags)):
            return
        own = {flag for entry in (self.case.old, self.case.new) if entry for flag in self._list_own_flags(entry)}
        if refused := [flag for flag in flags if not is_safe_flag(flag) and flag not in own]:
            raise UsageError(
                f"another user chose compiler flags that may write files or start programs: {' '.join(refused)}",
                hint="run hil bench with these flags, and judge its measurement",
            )

    def _list_own_flags(self, entry: HistoryEntry) -> list[str]:
        """Return the compiler flags of an entry's run, or none if this user did not start the run."""
        cases = self.restorer.opener.find(entry)
        if not isinstance(cases, StoredRunCases) or not cases.is_own:
            return []
        return [flag for case in cases.run.record.cases if case.artifact is not None for flag in case.artifact.flags]

    @functools.cached_property
    def good(self) -> Case | None:
        """The program that passed before, or None if the history does not contain it."""
        if self.case.old is None or not self.case.is_stored:
            return None
        return self.restorer.restore_entry(self._cases, self.case.new, self.case.old, self._job)

    def call_board(self, call: Callable[[BoardSession], Case]) -> Case | BoardError:
        """Call a function with the board's session. After a board error, reconnect and return the error."""
        choice, faults = self._choice, self._job.faults
        try:
            case = call(self.pool.session(choice, runtimes=[self.case.new.key.runtime], faults=faults))
        except BoardError as error:
            self.pool.reconnect(choice, error, faults=faults)
            return error
        if isinstance(case.error, BoardError):
            self.pool.reconnect(choice, case.error, faults=faults)
        return case

    def release_board(self) -> None:
        """Close the board, so that a command can change or restart it. The next call opens it again."""
        self.pool.give_back(self._choice, faults=self._job.faults)

    @functools.cached_property
    def _stored(self) -> RunCase:
        stored = next((case for case in self._run.record.cases if case.name == self.case.new.case), None)
        if stored is None:
            raise UsageError(f"run {self._run.id} has no case {self.case.new.case}")
        return stored

    @property
    def _options(self) -> Options:
        """The options of the judged run, without files for debugging."""
        options = apply_model_settings(self._job.make_options(), Path(self._stored.path))
        if not self._cases.is_own:
            self.check_flags(options.compile_flags)
        return replace(
            options,
            debug_ir=None,
            debug_ir_passes=False,
            recompute=False,
            recompile=1,
            profile=False,
        )


def is_failing(verdict: GateVerdict) -> bool:
    """Return whether the new program failed when it ran last, for another reason than the board."""
    outcome = verdict.new.again or verdict.new.outcome
    return exit_code_for(outcome) != 0 and outcome not in BOARD_OUTCOMES
