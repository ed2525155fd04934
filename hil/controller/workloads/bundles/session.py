"""A board for as long as a bundle's cases run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hil.bundles import Method
from hil.bundles.cases import check_loaded
from hil.controller.backends.targets import described, likely_cause
from hil.controller.devices.board_factory import AnyBoard, AnyProgram, regain
from hil.controller.pipeline.case import Case, Workshop, end_case, staged
from hil.controller.pipeline.stages import conclude
from hil.core import clock
from hil.core.artifacts import Artifact
from hil.core.results import RunResult, Stage, Timings
from hil.core.tensors import TensorSpec, read_as
from hil.errors import BoardError, HilError, RunCrashed, StageTimeout

# What happens to every case, in this order.
STAGES = (Stage.PUSH, Stage.LOAD, Stage.RUN, Stage.COMPARE)


@dataclass(frozen=True)
class Todo:
    """A case of a method, as the pipeline has them."""

    method: Method
    case: Case


class Session:
    """The board for as long as it lasts, and on it the method that is loaded."""

    def __init__(self, artifact: Artifact, connect: Callable[[], AnyBoard], shop: Workshop) -> None:
        self._artifact = artifact
        self._connect = connect
        self._shop = shop
        self._board: AnyBoard | None = None
        self._program: AnyProgram | None = None
        self._method = ""
        # What made loading a method fail, or the board be gone for good: it would for the next case too.
        self._unloadable: HilError | None = None
        self._lost: BoardError | None = None

    def run(self, todo: Todo) -> None:
        """Take a case to its end."""
        case = todo.case
        self._shop.keep(case, "inputs")
        self._shop.keep(case, "references")
        if self._lost is not None:
            end_case(case, self._lost, Stage.PUSH)
            return
        for stage in self._stages(todo):
            if case.outcome:
                break
            stage()
        conclude(case, self._shop)
        if isinstance(case.error, (RunCrashed, StageTimeout)):
            self._let_go()
        if isinstance(case.error, BoardError):
            self._after_loss(case, case.error)

    def close(self) -> None:
        """Give the board back."""
        self._let_go()
        if self._board is not None:
            self._board.close()

    def _stages(self, todo: Todo) -> Iterator[Callable[[], None]]:
        yield lambda: self._push(todo.case)
        yield lambda: self._load(todo)
        yield lambda: self._execute(todo)

    def _push(self, case: Case) -> None:
        with staged(case, Stage.PUSH):
            start = clock.now_ns()
            self._shop.watch(case, Stage.PUSH, "")
            if self._board is None:
                self._board = self._connect()

            def pushed(sent: int, total: int) -> None:
                self._shop.watch(case, Stage.PUSH, f"{sent >> 10} of {total >> 10} KiB")

            case.pushed_bytes = self._board.push(self._artifact, pushed)
            case.timings = replace(case.timings, push_s=_since(start))

    def _load(self, todo: Todo) -> None:
        case = todo.case
        if self._method != todo.method.name:
            self._let_go()
            self._method, self._unloadable = todo.method.name, None
        with staged(case, Stage.LOAD):
            if self._unloadable is not None:
                raise self._unloadable
            if self._program is not None or self._board is None or case.artifact is None:
                return
            start = clock.now_ns()
            self._shop.watch(case, Stage.LOAD, "")
            try:
                options = case.options
                self._program = self._board.load(
                    case.artifact, timeout=options.timeout, no_fallback=options.no_fallback
                )
                check_loaded(todo.method.name, todo.method.signature, self._program.loaded.inputs)
            except BoardError:
                raise
            except HilError as error:
                self._unloadable = self._explained(error)
                raise
            case.timings = replace(case.timings, load_s=_since(start))

    def _execute(self, todo: Todo) -> None:
        case = todo.case
        with staged(case, Stage.RUN):
            program, options = self._program, case.options
            assert program is not None
            self._shop.watch(case, Stage.RUN, "")
            start = clock.now_ns()
            try:
                case.result, call = program.run(
                    case.inputs or {},
                    names=tuple(spec.name for spec in (case.model and case.model.outputs) or ()),
                    warmup=options.warmup,
                    iterations=options.iterations,
                    timeout=options.timeout,
                )
            except HilError as error:
                raise self._explained(error) from None
            case.result = _as_signed(case.result, program.loaded.outputs, todo.method.signature.outputs)
            case.timings = Timings(
                push_s=case.timings.push_s,
                load_s=case.timings.load_s,
                warmup_s=call.warmup_ns / 1e9 if options.warmup else None,
                run_s=max(_since(start) - call.fetch_s - call.warmup_ns / 1e9, 0.0),
                fetch_s=call.fetch_s,
            )
            self._shop.keep(case, "outputs")

    def _explained(self, error: HilError) -> HilError:
        """With the hint that it was compiled for another CPU, where it was."""
        if self._board is not None and self._artifact.runtime == "iree":
            target = described(self._artifact.flags)
            if not (self._board.info.get("simulated") and target.cpu == "host"):
                error.hint = likely_cause(error, target, self._board.info["machine"]) or error.hint
        return error

    def _after_loss(self, case: Case, error: BoardError) -> None:
        """Whatever is gone may come back for the next case: a new connection will tell."""
        self._program = None
        if self._board is None:
            self._lost = error
            return
        self._shop.watch(case, Stage(case.stage), "the board is gone, looking for it")
        self._board = regain(self._board, error, self._connect)
        case.reason = error.message

    def _let_go(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            program.unload()


def _as_signed(result: RunResult, own: Sequence[TensorSpec], bundled: Sequence[TensorSpec]) -> RunResult:
    """Integers of which the program does not say whether they have a sign as the bundle says."""
    if not len(result.outputs) == len(own) == len(bundled):
        return result
    triples = zip(result.outputs.items(), own, bundled, strict=True)
    return replace(result, outputs={name: read_as(array, spec.dtype, said) for (name, array), said, spec in triples})


def _since(start_ns: int) -> float:
    return (clock.now_ns() - start_ns) / 1e9
