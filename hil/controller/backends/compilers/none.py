"""No compiler: the model's own files are the program, or those that it can be converted into."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.conversions import can_convert, convert
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.core.digest import digest_file
from hil.core.results import Artifact, Model
from hil.core.runtimes import RUNTIMES
from hil.errors import UsageError


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
    """The model's files as a program, untouched where the runtime takes its format, else converted to one it takes.

    Raises:
        UsageError: the runtime does not load this format, nor anything that it can be converted into.
        CompileFailed, CompileCrashed, StageTimeout: it cannot be converted.
    """
    info = RUNTIMES.get(runtime)
    wanted = info.loads if info and info.loads else model.format
    by = ""
    if can_convert(model.format, wanted):
        settings: dict[str, Any] = {"cache": cache, "isolated": isolated, "recompute": recompute, "log": log}
        model, by = convert(model, wanted, timeout=timeout, **settings)
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
