"""Lower programs with ExecuTorch in an isolated process. Results are cached by content, versions and flags."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.backends.compilers import take_as_it_is
from hil.controller.backends.compilers.executorch_reasons import PartitionReasons, explain_nodes
from hil.controller.models.compiling import (
    CompileOrder,
    call_isolated,
    compile_cached,
    convert_compiler_errors,
    report_phase,
)
from hil.controller.models.executorch_backends import lower, pick_backend
from hil.controller.models.flows.recipe import read_recipe_notes
from hil.controller.storage.cache import Cache, read_digests
from hil.controller.storage.isolation.isolated import make_function_version
from hil.controller.storage.screen.texts import convert_foreign_errors
from hil.controller.storage.sources.packages import require_version
from hil.core.files import read_file
from hil.core.results import BACKEND_FLAG, BACKENDS, DELEGATE_FLAG, PORTABLE, Artifact, Model
from hil.errors import CompileFailed, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAIN = "main.pte"
NOTES = "notes.json"
# Suffix of the flag that allows portable kernels for nodes that the backend does not support. Without this suffix, hil
# requests the backend for all nodes.
_REST = f",{PORTABLE}"
_DEFAULT = f"xnnpack{_REST}"
_PACKAGES = ("executorch", "torch", "torchao")
_MAX_LISTED = 8
# Increase this when compiled programs change although the packages are the same. Cached programs become stale.
_VERSION = 6


def compile_executorch(model: Model, **order: Unpack[CompileOrder]) -> Artifact:
    """Lower a PyTorch program (.pt2) to a .pte file.

    Flags:
        ``--backend=NAME`` or ``--backend=NAME,portable``: a backend of
        :func:`hil.controller.models.executorch_backends.load_executorch_backends`.
        ``--OPTION=VALUE``: an option of that backend.

    The artifact's notes contain the lowering time, the program size and the delegated operators: see :func:`build`.
    The note ``text`` is a readable summary.

    Arguments and errors: see :func:`hil.controller.backends.compilers.compile_model`.
    """
    if model.format == "pte":
        return take_as_it_is(model, **order)
    if model.format != "pt2" or order["runtime"] != "executorch":
        raise UsageError(
            f"the executorch compiler requires a .pt2 file and the runtime executorch, got {model.format} and "
            f"{order['runtime']}",
            hint="torch.export.save(torch.export.export(module, inputs), 'model.pt2')",
        )
    chosen, options = _parse(order["flags"])
    name = chosen.removesuffix(_REST)
    backend = pick_backend(name)
    options = backend.given(name, options)
    versions = [require_version(package, "executorch") for package in _PACKAGES]
    by = f"executorch {versions[0]} {name}"
    how_made = {"backend": name, "options": options, **backend.made_by()}
    parts = {"versions": versions, "how": how_made, "build": make_function_version(build), "version": _VERSION}
    key = Cache.key("executorch", model=model.digest, **parts)
    debug_ir = order["debug_ir"]

    def make(folder: Path) -> None:
        arguments = {
            "model": str(model.path.absolute()),
            "backend": name,
            "options": options,
            "output": str(folder / MAIN),
            "debug_ir": str(debug_ir.absolute()) if debug_ir else None,
        }
        (folder / NOTES).write_text(json.dumps(call_isolated(build, arguments, order)))

    failed = f"ExecuTorch cannot lower {model.path.name}"
    errors = convert_compiler_errors("lowering", died="ExecuTorch's compiler died", failed=failed)
    entry, how = compile_cached(key, {"model": model.name, "compiler": by}, order, debug_ir, make, errors)
    notes = json.loads(read_file(entry / NOTES))
    flags = [f"{BACKEND_FLAG}{chosen}", *(f"--{option}={value}" for option, value in options.items())]
    if name not in BACKENDS and backend.needs and not backend.needs[0].endswith("::"):
        flags.append(f"{DELEGATE_FLAG}{backend.needs[0]}")
    return Artifact(
        runtime="executorch",
        main=MAIN,
        files={MAIN: entry / MAIN},
        digests={MAIN: read_digests(entry)[MAIN]},
        function=model.function,
        compiler=f"executorch {versions[0]}",
        flags=tuple(flags),
        inputs=model.inputs,
        outputs=model.outputs,
        **how,
        notes={
            "text": format_delegation(notes["delegation"]),
            **read_recipe_notes(model.path),
            **notes,
            "needs": list(backend.needs) if name not in BACKENDS else [],
        },
    )


def format_delegation(delegation: Mapping[str, Any]) -> str:
    """Format the delegation counts.

    Example: ``delegated 12 of 14 nodes (XnnpackBackend); undelegated: aten.view_copy.default 2``.
    """
    taken, left = (sum(delegation[name].values()) for name in ("delegated", "undelegated"))
    backends = f" ({', '.join(delegation['backends'])})" if delegation["backends"] else ""
    text = f"delegated {taken} of {taken + left} node{'s' * (taken + left != 1)}{backends}"
    most = sorted(delegation["undelegated"].items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [f"{name} {count}" for name, count in most[:_MAX_LISTED]]
    shown += [f"{len(most) - _MAX_LISTED} more operators"] * (len(most) > _MAX_LISTED)
    return f"{text}; undelegated: {', '.join(shown)}" if shown else text


def _parse(flags: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the value of ``--backend=`` and the backend's options."""
    chosen, options = _DEFAULT, {}
    for flag in flags:
        name, is_set, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not is_set:
            raise UsageError(
                f"unsupported flag {flag!r} of the executorch compiler",
                hint=f"expected {BACKEND_FLAG}NAME, or --OPTION=VALUE for an option of the backend",
            )
        if flag.startswith(BACKEND_FLAG):
            chosen = value
        else:
            options[name] = value
    return chosen, options


# Graph nodes without computation, which only pass values.
_NO_WORK = ("executorch_call_delegate", "getitem")


def build(model: str, backend: str, options: dict[str, str], output: str, debug_ir: str | None) -> dict[str, Any]:
    """Lower a program and write the .pte file. Runs in an isolated process.

    Args:
        backend, options: See :func:`hil.controller.models.executorch_backends.load_executorch_backends`.
        debug_ir: A directory for the graph before and after lowering, as text; or None.

    Returns:
        ``lower_s``: the lowering time in seconds; ``program_bytes``: the file size; ``delegation``: see
        :func:`count_delegated`.
    """
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
    from torch.export.graph_signature import OutputKind

    from hil.controller.models.importers.exported.pt2 import keep_outputs, list_new_values
    from hil.controller.models.importers.exported.pt2_archive import load_program

    report_phase("load")
    program = load_program(model)
    passes = []
    if list_new_values(program):
        # Buffers still have state between calls. For mutated inputs, only return the new values: ExecuTorch would put
        # mutations before the program's outputs.
        program = program.run_decompositions({})
        keep_outputs(program, lambda spec: spec.kind is not OutputKind.USER_INPUT_MUTATION)
        # Without this pass, ExecuTorch initializes buffers with zeros instead of their saved values.
        passes = [InitializedMutableBufferPass(list(program.graph_signature.inputs_to_buffers))]
    if debug_ir is not None:
        Path(debug_ir, "exported.txt").write_text(str(program))
    start = time.monotonic()
    report_phase("lower: to edge, transform and partition")
    with convert_foreign_errors(CompileFailed, f"ExecuTorch cannot lower {Path(model).name}"):
        with PartitionReasons() as reasons:
            lowered = lower(backend, program, options)
        seconds = time.monotonic() - start
        edge = lowered.exported_program()
        if debug_ir is not None:
            Path(debug_ir, "lowered.txt").write_text(str(edge))
        delegation = count_delegated(edge.graph_module)
        nodes = _list_operators(edge.graph_module.graph)
        delegation["reasons"] = explain_nodes(nodes, reasons.by_node, backend)
        report_phase("emit: to ExecuTorch's program")
        with Path(output).open("wb") as file:
            lowered.to_executorch(ExecutorchBackendConfig(passes=passes)).write_to_file(file)
    return {"lower_s": seconds, "program_bytes": Path(output).stat().st_size, "delegation": delegation}


def count_delegated(graph_module: Any) -> dict[str, Any]:
    """Count the nodes of a lowered graph that run on backends and on ExecuTorch's kernels.

    Returns:
        ``backends``: the backend names; ``delegated`` and ``undelegated``: operator -> number of nodes.
    """
    delegated: Counter[str] = Counter()
    backends: dict[str, None] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and hasattr(part := getattr(graph_module, node.target), "backend_id"):
            backends[part.backend_id] = None
            delegated.update(operator for _, operator in _list_operators(part.original_module.graph))
    return {
        "backends": list(backends),
        "delegated": dict(sorted(delegated.items())),
        "undelegated": dict(sorted(Counter(operator for _, operator in _list_operators(graph_module.graph)).items())),
    }


def _list_operators(graph: Any) -> list[tuple[str, str]]:
    """Return (name, operator) of each node that computes."""
    from torch._ops import OpOverload

    nodes = [(node.name, node.target) for node in graph.nodes if node.op == "call_function"]
    # The edge dialect contains some operators of torch, whose namespace is only in their string form.
    named = [(name, str(one if isinstance(one, OpOverload) else getattr(one, "__name__", one))) for name, one in nodes]
    return [pair for pair in named if pair[1] not in _NO_WORK]
