"""A board as the programs of a module see it: each is compiled once, pushed, and kept loaded over the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hil.controller.backends.compilers import compile_model
from hil.controller.backends.targets import explain
from hil.controller.devices.board import Board, LoadedProgram
from hil.controller.pipeline.board_pool import BoardPool, BoardSession
from hil.controller.pipeline.options import COMPILE_TIMEOUT_S, DEFAULT_TIMEOUT_S
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import storing, write_file
from hil.core.results import Artifact, Model, Stage, placement_text
from hil.core.runtimes import compiler_for
from hil.core.tensors import Array, TensorSpec, dtype_name, spec_of
from hil.errors import BoardError, HilError, RunFailed, StageError, UsageError
from hil.testing.traces.backends import Backend
from hil.testing.traces.runners import Answer, same_bits

# A module's programs stay loaded over its calls, and with them their state.
_MOST_LOADED = 1 << 20


class Target:
    """A board that a module's programs run on. It is taken when it is first needed, and again after :meth:`close`.

    Args:
        folder: where what compiling leaves behind goes.
    """

    def __init__(self, backend: Backend, context: RunContext, folder: Path) -> None:
        assert backend.choice is not None
        self.backend = backend
        self.folder = folder
        self._context = context
        self._choice = backend.choice
        self._device = backend.choice.config.devices.get(backend.runtime, "")  # "" is the runtime's own choice
        self._pool = BoardPool(f"traces on {backend.name}", opened=self._take, most_loaded=_MOST_LOADED)

    def compile(self, model: Model, place: Path) -> Artifact:
        """Compile a model for the board and keep the program: its files are the copies.

        Args:
            place: the main file's copy; others lie beside it.

        Raises:
            CompileFailed, CompileCrashed, StageTimeout: it cannot be compiled; what shows that lies beside ``place``.
            BoardError: the board alone can say what to compile for, and does not answer.
        """
        runtime = self.backend.runtime
        compiler = compiler_for(model.format, runtime)
        flags = self._session().board.config.compile_flags.get(compiler, ())
        with storing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        artifact = compile_model(
            model,
            compiler=compiler,
            runtime=runtime,
            flags=flags,
            cache=self._context.cache,
            isolated=self._context.isolated,
            recompute=False,
            debug_ir=None,
            timeout=COMPILE_TIMEOUT_S,
            log=self.folder / "compile.log",
            failure=place.parent,
        )
        kept = {name: place if name == artifact.main else place.parent / name for name in artifact.files}
        for name, path in artifact.files.items():
            write_file(kept[name], path.read_bytes(), option="")
        return replace(artifact, files=kept)

    def run(self, artifact: Artifact, function: str, arrays: Sequence[Array], outputs: Sequence[TensorSpec]) -> Answer:
        """Run a function of a program, which stays loaded; one that failed is loaded anew for the next call.

        Args:
            function: which of its functions; "" is the only one.
            arrays: the inputs, in order.
            outputs: what the model itself says it returns; a program may know no unsigned integers.

        Raises:
            StageError, BoardError: as it ends.
            UsageError: the board has no such runtime or device.
        """
        artifact = replace(artifact, function=function)
        try:
            program = self._load(artifact)
            specs = program.loaded.inputs
            if len(specs) != len(arrays):
                raise RunFailed(f"the program takes {len(specs)} inputs, not {len(arrays)}", stage=Stage.RUN.value)
            given = {spec.name: same_bits(spec.dtype, array) for spec, array in zip(specs, arrays, strict=True)}
            result, _ = program.run(given, timeout=DEFAULT_TIMEOUT_S)
        except HilError as error:
            error.located(stage=Stage.RUN.value, board=self.backend.board)
            if artifact.runtime == "iree" and self._pool.is_open(self._choice):
                explain(error, artifact.flags, self._session().board.info)
            if isinstance(error, BoardError):
                self.close()
            elif isinstance(error, StageError) and self._pool.is_open(self._choice):
                self._session().after_run(artifact, broken=True)
            raise
        returned = list(result.outputs.values())
        if not outputs:  # a program in a file may keep that to itself
            outputs = [spec_of(name, array) for name, array in result.outputs.items()]
        if len(returned) != len(outputs):
            raise RunFailed(f"the program returned {len(returned)} outputs, not {len(outputs)}", stage=Stage.RUN.value)
        # Copies: a view of what the link received would keep all of that.
        own = tuple(same_bits(spec.dtype, array).copy() for spec, array in zip(outputs, returned, strict=True))
        parts = result.provenance.get("placement") or ()
        where = f" ({placement_text(parts)})" if len(parts) > 1 else ""
        dtypes = tuple(dtype_name(array.dtype) for array in returned)
        return Answer(artifact, self._device, tuple(given.values()), own, dtypes, result.source + where)

    def close(self) -> None:
        """Give the board back."""
        self._pool.give_back(self._choice)

    def _session(self) -> BoardSession:
        return self._pool.session(self._choice, runtimes=(self.backend.runtime,))

    def _load(self, artifact: Artifact) -> LoadedProgram:
        session = self._session()
        try:
            if not session.has(artifact):
                session.board.push(artifact)
            program, _ = session.load(artifact, timeout=DEFAULT_TIMEOUT_S)
        except HilError as error:
            error.located(stage=Stage.LOAD.value)
            raise
        return program

    def _take(self, board: Board) -> None:
        """Refuse a board that lacks the runtime or the driver, and have it for ourselves."""
        runtime, device = self.backend.runtime, self._device.split("://")[0]
        there = {one["name"]: one for one in board.info.get("runtimes", ())}
        if runtime not in there:
            raise UsageError(
                f"{self.backend.name}: {board.name} has no runtime {runtime!r}",
                hint=f"it has {', '.join(there) or 'none'}; is hil[{runtime}] installed there?",
            )
        devices = there[runtime].get("devices", ())
        if runtime == "iree" and device and devices and device not in [one.split("://")[0] for one in devices]:
            raise UsageError(
                f"{self.backend.name}: IREE has no {device} device on {board.name}",
                hint=f"it has {', '.join(devices)}: leave {self.backend.name} out, or install the driver",
            )
        board.take()
