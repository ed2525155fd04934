"""ExecuTorch's ahead-of-time lowering, run in a process of its own and cached by content, versions and flags."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.backends.compilers.executorch_build import build
from hil.controller.backends.compilers.none import take_as_it_is
from hil.controller.models.compiling import compiling
from hil.controller.models.flows.recipe import recipe_notes
from hil.controller.storage.cache import Cache, digests_in
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.packages import needed_version
from hil.core.results import BACKEND_FLAG, Artifact, Model
from hil.errors import UsageError, did_you_mean

MAIN = "main.pte"
LOG = "compile.log"
NOTES = "notes.json"
# By the flag's value. A backend alone is where the program is told to run; beside it, the portable kernels may take
# what it leaves.
BACKENDS = ("xnnpack,portable", "xnnpack", "portable")
_PACKAGES = ("executorch", "torch", "torchao")
_TOLD = 8
# Raise this when what is made of a model changes without those packages: older programs in the cache are then not used.
_VERSION = 3


def compile_executorch(
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
    """Lower a PyTorch program (.pt2) to a .pte. The one flag is ``--backend=`` and one of :data:`BACKENDS`.

    The artifact's notes say how long lowering took, how large the program is, and which operators were delegated:
    :func:`hil.controller.backends.compilers.executorch_build.build`; ``text`` says it to people.

    Arguments and errors are those of :func:`hil.controller.backends.compilers.compile_model`.
    """
    if model.format == "pte":
        return take_as_it_is(
            model,
            runtime=runtime,
            flags=flags,
            cache=cache,
            isolated=isolated,
            recompute=recompute,
            debug_ir=debug_ir,
            timeout=timeout,
            log=log,
        )
    if model.format != "pt2" or runtime != "executorch":
        raise UsageError(
            f"the executorch compiler makes programs for the runtime executorch of PyTorch's .pt2 files, not for "
            f"{runtime} of {model.format}",
            hint="torch.export.save(torch.export.export(module, inputs), 'model.pt2')",
        )
    backend = _backend(flags)
    versions = [needed_version(package, "executorch") for package in _PACKAGES]
    partitioner = backend.partition(",")[0]
    by = f"executorch {versions[0]} {partitioner}"
    key = Cache.key("executorch", model=model.digest, versions=versions, backend=partitioner, version=_VERSION)
    if debug_ir is not None:
        try:
            debug_ir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{debug_ir} cannot be made: {error.strerror}", hint="--debug-ir names a folder"
            ) from error

    def make(folder: Path) -> None:
        start = log.stat().st_size if log.exists() else 0
        arguments = {
            "model": str(model.path.absolute()),
            "backend": partitioner,
            "output": str(folder / MAIN),
            "debug_ir": str(debug_ir.absolute()) if debug_ir else None,
        }
        with compiling(
            "lowering", died="ExecuTorch's compiler died", failed=f"ExecuTorch cannot lower {model.path.name}"
        ):
            notes = isolated.call(build, arguments, timeout=timeout, log=log)
        (folder / NOTES).write_text(json.dumps(notes))
        with log.open("rb") as file:
            file.seek(start)
            (folder / LOG).write_bytes(file.read())

    began = time.monotonic()
    entry, cached = cache.get_or_make(
        key, {"model": model.name, "compiler": by}, make, recompute or debug_ir is not None
    )
    notes = json.loads((entry / NOTES).read_bytes())
    return Artifact(
        runtime="executorch",
        main=MAIN,
        files={MAIN: entry / MAIN},
        digests={MAIN: digests_in(entry)[MAIN]},
        function=model.function,
        compiler=f"executorch {versions[0]}",
        flags=(f"{BACKEND_FLAG}{backend}",),
        inputs=model.inputs,
        outputs=model.outputs,
        cached=cached,
        seconds=0.0 if cached else time.monotonic() - began,
        log=entry / LOG,
        notes={"text": delegation_text(notes["delegation"]), **recipe_notes(model.path), **notes},
    )


def delegation_text(delegation: Mapping[str, Any]) -> str:
    """``delegated 12 of 14 nodes (XnnpackBackend); undelegated: aten.view_copy.default 2``."""
    taken, left = (sum(delegation[name].values()) for name in ("delegated", "undelegated"))
    backends = f" ({', '.join(delegation['backends'])})" if delegation["backends"] else ""
    text = f"delegated {taken} of {taken + left} node{'s' * (taken + left != 1)}{backends}"
    most = sorted(delegation["undelegated"].items(), key=lambda pair: (-pair[1], pair[0]))
    told = [f"{name} {count}" for name, count in most[:_TOLD]]
    told += [f"{len(most) - _TOLD} more operators"] * (len(most) > _TOLD)
    return f"{text}; undelegated: {', '.join(told)}" if told else text


def _backend(flags: Sequence[str]) -> str:
    chosen = BACKENDS[0]
    for flag in flags:
        if not flag.startswith(BACKEND_FLAG):
            raise UsageError(
                f"the executorch compiler has no flag {flag!r}", hint=f"it takes {BACKEND_FLAG}{'|'.join(BACKENDS)}"
            )
        chosen = flag.removeprefix(BACKEND_FLAG)
        if chosen not in BACKENDS:
            raise UsageError(
                f"ExecuTorch's package has no backend {chosen!r}",
                hint=f"{did_you_mean(chosen, BACKENDS)}one of {' | '.join(BACKENDS)}",
            )
    return chosen
