"""No compiler: the model's own files are the program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hil.bundle import Artifact, Model
from hil.controller.cache import Cache
from hil.controller.isolated import Isolated
from hil.digest import digest_file
from hil.errors import UsageError

# What each runtime loads as it is.
_TAKES = {"onnxruntime": "onnx", "iree": "vmfb"}


def take_as_it_is(
    model: Model,
    *,
    runtime: str,
    flags: Sequence[str],
    cache: Cache,
    isolated: Isolated,
    recompute: bool,
    debug_ir: Path | None,
    timeout: float | None,
    log: Path,
) -> Artifact:
    """The model's files as a program, untouched.

    Raises:
        UsageError: the runtime does not load this format.
    """
    if _TAKES.get(runtime, model.format) != model.format:
        raise UsageError(
            f"the runtime {runtime} cannot load {model.path.name}: it takes .{_TAKES[runtime]} files",
            hint="--runtime iree compiles it" if runtime == "onnxruntime" else "choose another --runtime",
        )
    return Artifact(
        runtime=runtime,
        main=model.path.name,
        files=model.files,
        digests={name: digest_file(path) for name, path in model.files.items()},
        function=model.function,
        compiler="none",
        inputs=model.inputs,
        outputs=model.outputs,
    )
