"""ExecuTorch's ahead-of-time lowering, run in a process of its own and cached by content, versions and flags."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.backends.compilers import take_as_it_is
from hil.controller.models.compiling import CompileOrder, call_isolated, compile_cached, compiling, entering
from hil.controller.models.flows.recipe import recipe_notes
from hil.controller.storage.cache import Cache, digests_in
from hil.controller.storage.packages import needed_version
from hil.controller.storage.texts import foreign_errors
from hil.core.results import BACKEND_FLAG, Artifact, Model
from hil.errors import CompileFailed, UsageError, did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAIN = "main.pte"
NOTES = "notes.json"
# By the flag's value. A backend alone is where the program is told to run; beside it, the portable kernels may take
# what it leaves.
BACKENDS = ("xnnpack,portable", "xnnpack", "portable")
_PACKAGES = ("executorch", "torch", "torchao")
_TOLD = 8
# Raise this when what is made of a model changes without those packages: older programs in the cache are then not used.
_VERSION = 3


def compile_executorch(model: Model, **order: Unpack[CompileOrder]) -> Artifact:
    """Lower a PyTorch program (.pt2) to a .pte. The one flag is ``--backend=`` and one of :data:`BACKENDS`.

    The artifact's notes say how long lowering took, how large the program is, and which operators were delegated:
    :func:`build`; ``text`` says it to people.

    Arguments and errors are those of :func:`hil.controller.backends.compilers.compile_model`.
    """
    if model.format == "pte":
        return take_as_it_is(model, **order)
    if model.format != "pt2" or order["runtime"] != "executorch":
        raise UsageError(
            f"the executorch compiler makes programs for the runtime executorch of PyTorch's .pt2 files, not for "
            f"{order['runtime']} of {model.format}",
            hint="torch.export.save(torch.export.export(module, inputs), 'model.pt2')",
        )
    backend = _backend(order["flags"])
    versions = [needed_version(package, "executorch") for package in _PACKAGES]
    partitioner = backend.partition(",")[0]
    by = f"executorch {versions[0]} {partitioner}"
    key = Cache.key("executorch", model=model.digest, versions=versions, backend=partitioner, version=_VERSION)
    debug_ir = order["debug_ir"]

    def make(folder: Path) -> None:
        arguments = {
            "model": str(model.path.absolute()),
            "backend": partitioner,
            "output": str(folder / MAIN),
            "debug_ir": str(debug_ir.absolute()) if debug_ir else None,
        }
        (folder / NOTES).write_text(json.dumps(call_isolated(build, arguments, order)))

    failed = f"ExecuTorch cannot lower {model.path.name}"
    errors = compiling("lowering", died="ExecuTorch's compiler died", failed=failed)
    entry, how = compile_cached(key, {"model": model.name, "compiler": by}, order, debug_ir, make, errors)
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
        **how,
        notes={"text": delegation_text(notes["delegation"]), **recipe_notes(model.path), **notes},
    )


def delegation_text(delegation: Mapping[str, Any]) -> str:
    """``delegated 12 of 14 nodes (XnnpackBackend); undelegated: aten.view_copy.default 2``."""
    taken, left = (sum(delegation[name].values()) for name in ("delegated", "undelegated"))
    backends = f" ({', '.join(delegation['backends'])})" if delegation["backends"] else ""
    text = f"delegated {taken} of {taken + left} node{'s' * (taken + left != 1)}{backends}"
    most = sorted(delegation["undelegated"].items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [f"{name} {count}" for name, count in most[:_TOLD]]
    shown += [f"{len(most) - _TOLD} more operators"] * (len(most) > _TOLD)
    return f"{text}; undelegated: {', '.join(shown)}" if shown else text


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


# What only carries values about.
_NO_WORK = ("executorch_call_delegate", "getitem")


def build(model: str, backend: str, output: str, debug_ir: str | None) -> dict[str, Any]:
    """Lower a program and write it; called in an isolated process.

    Args:
        backend: ``xnnpack``, which takes what it can, or ``portable``.
        debug_ir: a folder for the graph before and after it was lowered, as text; or None.

    Returns:
        ``lower_s``: seconds that lowering took; ``program_bytes``; ``delegation``: ``backends``, ``delegated`` and
        ``undelegated``, each operator -> how many nodes.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
    from torch.export.graph_signature import OutputKind

    from hil.controller.models.importers.pt2 import new_values, returning
    from hil.controller.models.importers.pt2_archive import load_program

    entering("load")
    program = load_program(model)
    passes = []
    if new_values(program):
        # It keeps its buffers from call to call all the same. What it writes back into inputs is only returned:
        # ExecuTorch would do that before the program's own outputs.
        program = program.run_decompositions({})
        returning(program, lambda spec: spec.kind is not OutputKind.USER_INPUT_MUTATION)
        # Without it ExecuTorch begins with zeros, whatever the buffers were saved with.
        passes = [InitializedMutableBufferPass(list(program.graph_signature.inputs_to_buffers))]
    if debug_ir is not None:
        Path(debug_ir, "exported.txt").write_text(str(program))
    start = time.monotonic()
    entering("lower: to edge, transform and partition")
    with foreign_errors(CompileFailed, f"ExecuTorch cannot lower {Path(model).name}"):
        lowered = to_edge_transform_and_lower(
            program,
            partitioner=[XnnpackPartitioner()] if backend == "xnnpack" else [],
            # Operators beyond PyTorch's core ones: the board says by name which of them its kernels lack.
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        seconds = time.monotonic() - start
        edge = lowered.exported_program()
        if debug_ir is not None:
            Path(debug_ir, "lowered.txt").write_text(str(edge))
        delegation = shared_out(edge.graph_module)
        entering("emit: to ExecuTorch's program")
        with Path(output).open("wb") as file:
            lowered.to_executorch(ExecutorchBackendConfig(passes=passes)).write_to_file(file)
    return {"lower_s": seconds, "program_bytes": Path(output).stat().st_size, "delegation": delegation}


def shared_out(graph_module: Any) -> dict[str, Any]:
    """How a lowered graph is shared out between backends and ExecuTorch's own kernels: see :func:`build`."""
    delegated: Counter[str] = Counter()
    backends: dict[str, None] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and hasattr(part := getattr(graph_module, node.target), "backend_id"):
            backends[part.backend_id] = None
            delegated.update(_operators(part.original_module.graph))
    return {
        "backends": list(backends),
        "delegated": dict(sorted(delegated.items())),
        "undelegated": dict(sorted(Counter(_operators(graph_module.graph)).items())),
    }


def _operators(graph: Any) -> list[str]:
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    names = (str(getattr(target, "__name__", target)) for target in targets)
    return [name for name in names if name not in _NO_WORK]
