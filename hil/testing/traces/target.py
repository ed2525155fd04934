"""Run a module's programs on a board. Each program is compiled and pushed once, and stays loaded between calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hil.controller.backends.compilers import compile_model
from hil.controller.backends.gpu_targets import combine_flags
from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import refuse_missing_device
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import COMPILE_TIMEOUT_SECONDS, CaseSettings, Options
from hil.controller.pipeline.verdicts.repetition import decide_instability
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import convert_write_errors, write_file
from hil.controller.workloads.traces.trace import MAX_LOADED, CallProgram, reinterpret_bits
from hil.core.files import MAX_MODEL_BYTES, read_file
from hil.core.results import Artifact, Model, Stage, format_node_counts
from hil.core.runtimes import choose_compiler
from hil.core.tensors import Array, TensorSpec, get_dtype_name, make_spec
from hil.errors import (
    AnswersDiffer,
    BoardError,
    BoardUnfit,
    HilError,
    NotRun,
    RunFailed,
    StageError,
    StorageError,
    UsageError,
)
from hil.formats.iree_command import is_sign_shown
from hil.testing.traces.backends import Backend
from hil.testing.traces.runners import ProgramResult


class BoardTarget:
    """Board for a module's programs. The first use opens the board, also after :meth:`close`.

    Args:
        folder: Directory for output of the compiler.
        settings: Settings to compile and run programs.
    """

    def __init__(
        self, backend: Backend, context: RunContext, folder: Path, settings: CaseSettings | None = None
    ) -> None:
        assert backend.choice is not None
        self.backend = backend
        self.folder = folder
        self._context = context
        self._choice = backend.choice
        self._device = backend.choice.config.devices.get(backend.runtime, "")  # "" is the runtime's default
        self._pool = BoardPool(
            f"traces on {backend.name}", opened=self._take_board, most_loaded=MAX_LOADED, needs_device=False
        )
        self._runner = Runner(context, logs=False)
        self._options = Options(**vars(settings or CaseSettings()), runtime=backend.runtime)

    def compile(self, model: Model, place: Path) -> Artifact:
        """Compile a model for the board. Return the artifact with stored copies of its files.

        Args:
            place: Path of the main file's copy. Other files are in the same directory.

        Raises:
            CompileFailed, CompileCrashed, StageTimeout: compilation failed. Files to reproduce it are in ``place``'s
                directory.
            BoardError: only the board knows the compile target, and it does not respond.
            NotRun: the board lacks the runtime or device, or the runtime does not support the model.
        """
        config = self._open_session().board.config
        with convert_write_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        settings, runtime = self._options, self.backend.runtime
        # Use a directory per program: a module may have many programs per backend.
        ir = settings.debug_ir and settings.debug_ir / self.folder.parent.name / self.folder.name / place.stem
        compiler = choose_compiler(model.format, runtime)
        try:
            artifact = compile_model(
                model,
                compiler=compiler,
                runtime=runtime,
                flags=combine_flags(config.compile_flags.get(compiler, ()), settings.compile_flags),
                cache=self._context.cache,
                isolated=self._context.isolated,
                recompute=settings.recompute,
                debug_ir=ir,
                debug_ir_passes=settings.debug_ir_passes,
                timeout=COMPILE_TIMEOUT_SECONDS,
                log=self.folder / "compile.log",
                failure=place.parent,
            )
        except StorageError:
            raise
        except UsageError as error:
            raise NotRun(f"{self.backend.name}: {error.message}", stage=Stage.COMPILE.value, hint=error.hint) from error
        kept = {name: place if name == artifact.main else place.parent / name for name in artifact.files}
        for name, path in artifact.files.items():
            write_file(kept[name], read_file(path, MAX_MODEL_BYTES), option="")
        return replace(artifact, files=kept)

    def run(
        self,
        artifact: Artifact,
        function: str,
        arrays: Sequence[Array],
        outputs: Sequence[TensorSpec],
        program: CallProgram | None = None,
    ) -> ProgramResult:
        """Run a function of a program. The program stays loaded. After a failure, the next call reloads it.

        Args:
            function: The function's name; "" is the only function.
            arrays: The inputs, in order.
            outputs: Output specs of the model. The program may not support unsigned integers.
            program: The program's entry in the trace; None creates an entry without a model.

        Raises:
            StageError, BoardError: the run failed.
            NotRun: the board lacks the runtime or device.
        """
        artifact = replace(artifact, function=function, inputs=None, outputs=None)
        given: dict[str, Array] = {}

        def bind(specs: Sequence[TensorSpec]) -> dict[str, Array]:
            if len(specs) != len(arrays):
                raise RunFailed(f"the program expects {len(specs)} inputs, got {len(arrays)}", stage=Stage.RUN.value)
            given.update(
                {spec.name: reinterpret_bits(spec.dtype, one) for spec, one in zip(specs, arrays, strict=True)}
            )
            return given

        path = artifact.files.get(artifact.main, self.folder)
        case = Case(function, path, self._options, self.folder, artifact=artifact, make_inputs=bind)
        session = self._open_session()
        case = self._runner.execute(case, session)
        if case.error is not None:
            case.error.locate(board=self.backend.board)
            if isinstance(case.error, BoardError):
                self.close()
            elif isinstance(case.error, StageError):
                session.unload_after_run(artifact, broken=True)
            raise case.error
        result = case.result
        assert result is not None
        is_unstable, why = decide_instability(result.repetition, {}, None, self._options.allow_unstable)
        if is_unstable:
            raise AnswersDiffer(why, stage=Stage.RUN.value, board=self.backend.board)
        returned = list(result.outputs.values())
        if not outputs:  # a program file may not declare its outputs
            outputs = [make_spec(name, array) for name, array in result.outputs.items()]
        if len(returned) != len(outputs):
            raise RunFailed(
                f"expected {len(outputs)} outputs from the program, got {len(returned)}", stage=Stage.RUN.value
            )
        # Copy: a view would keep the complete received message in memory.
        own = tuple(reinterpret_bits(spec.dtype, array).copy() for spec, array in zip(outputs, returned, strict=True))
        parts = result.provenance.get("placement") or ()
        devices = format_node_counts((part["device"], part["nodes"]) for part in parts)
        where = f" ({devices})" if len(parts) > 1 else ""
        where += "".join(f", software device: {part['software']}" for part in parts if part.get("software"))
        dtypes = tuple(get_dtype_name(array.dtype) for array in returned)
        loaded, _ = session.load(artifact, timeout=self._options.timeout)
        shown = zip(loaded.loaded.outputs, dtypes, strict=True)
        unsigned = tuple(is_sign_shown(one.dtype, dtype) for one, dtype in shown)
        kept = program or CallProgram(path, function, artifact.runtime)
        source = result.source + where
        return ProgramResult(artifact, kept, self._device, tuple(given.values()), own, dtypes, source, unsigned)

    def open(self) -> None:
        """Open the board. Raises NotRun, BoardError: see :meth:`compile`."""
        self._open_session()

    def close(self) -> None:
        """Release the board."""
        self._pool.give_back(self._choice)

    def _open_session(self) -> BoardSession:
        try:
            return self._pool.session(self._choice, runtimes=(self.backend.runtime,))
        except HilError as error:
            raise error.locate(stage=Stage.LOAD.value, board=self.backend.board) from error.__cause__

    def _take_board(self, board: Board) -> None:
        """Lock the board for exclusive use. Reject a board without the runtime or driver."""
        runtime = self.backend.runtime
        there = {one["name"]: one for one in board.info.get("runtimes", ())}
        if runtime not in there:
            raise NotRun(
                f"{self.backend.name}: board {board.name} does not support runtime {runtime!r}",
                hint=f"available runtimes: {', '.join(there) or 'none'}; install hil[{runtime}] on the board",
            )
        try:
            refuse_missing_device(board.config, runtime, board.info, board.name)
        except BoardUnfit as error:
            raise NotRun(
                f"{self.backend.name}: {error.message}", hint=f"{error.hint}; or remove {self.backend.name}"
            ) from error
        board.take()
