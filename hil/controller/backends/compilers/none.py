"""No compiler: the model's own files are the program, or those that it can be converted into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hil.controller.models.compiling import CompileOrder
from hil.controller.models.conversions import can_convert, convert
from hil.core.digest import digest_file
from hil.core.results import Artifact, Model
from hil.core.runtimes import RUNTIMES
from hil.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack


def take_as_it_is(model: Model, **order: Unpack[CompileOrder]) -> Artifact:
    """The model's files as a program, untouched where the runtime takes its format, else converted to one it takes.

    Raises:
        UsageError: the runtime does not load this format, nor anything that it can be converted into.
        CompileFailed, CompileCrashed, StageTimeout: it cannot be converted.
    """
    runtime = order["runtime"]
    info = RUNTIMES.get(runtime)
    wanted = info.loads if info and info.loads else model.format
    by = ""
    if can_convert(model.format, wanted):
        model, by = convert(model, wanted, order)
    if model.format != wanted:
        raise UsageError(
            f"the runtime {runtime} cannot load {model.path.name}: it takes .{wanted} files",
            hint="--runtime iree compiles it" if runtime == "onnxruntime" else "choose another --runtime",
        )
    return Artifact(
        runtime=runtime,
        main=next(name for name, path in model.files.items() if path == model.path),
        files=model.files,
        digests={name: digest_file(path) for name, path in model.files.items()},
        function=model.function,
        compiler=by or "none",
        inputs=model.inputs,
        outputs=model.outputs,
    )
