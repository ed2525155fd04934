"""What happens in the isolated process: a PyTorch program into an ExecuTorch one. The controller calls nothing here."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from hil.controller.storage.texts import first_line
from hil.errors import CompileFailed

# What only carries values about.
_NO_WORK = ("executorch_call_delegate", "getitem")


def build(model: str, backend: str, output: str, debug_ir: str | None) -> dict[str, Any]:
    """Lower a program and write it.

    Args:
        model: the .pt2 file.
        backend: ``xnnpack``, which takes what it can, or ``portable``.
        output: the .pte file.
        debug_ir: a folder for the graph before and after it was lowered, as text; or None.

    Returns:
        ``lower_s``: seconds that lowering took; ``program_bytes``; ``delegation``: ``backends``, ``delegated`` and
        ``undelegated``, each operator -> how many nodes.

    Raises:
        ImportFailed: the file cannot be read.
        CompileFailed: ExecuTorch cannot lower it.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass

    from hil.controller.models.importers.pt2 import new_values
    from hil.controller.models.importers.pt2_archive import load_program

    program = load_program(model)
    passes = []
    if new_values(program):
        program = _showing_state(program.run_decompositions({}))
        # Without it ExecuTorch begins with zeros, whatever the buffers were saved with.
        passes = [InitializedMutableBufferPass(list(program.graph_signature.inputs_to_buffers))]
    if debug_ir is not None:
        Path(debug_ir, "exported.txt").write_text(str(program))
    start = time.monotonic()
    try:
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
        with Path(output).open("wb") as file:
            lowered.to_executorch(ExecutorchBackendConfig(passes=passes)).write_to_file(file)
    except Exception as error:  # each pass has errors of its own
        raise CompileFailed(
            f"ExecuTorch cannot lower {Path(model).name}: {first_line(error)}",
            detail=f"{type(error).__name__}: {error}",
        ) from error
    return {"lower_s": seconds, "program_bytes": Path(output).stat().st_size, "delegation": delegation}


def _showing_state(program: Any) -> Any:
    """A program that returns the new values of what it changes after its own outputs.

    It keeps its buffers from call to call all the same. What it writes back into inputs is only returned: ExecuTorch
    would do that before the program's own outputs.
    """
    from torch.export.graph_signature import OutputKind, OutputSpec
    from torch.utils._pytree import tree_structure

    from hil.controller.models.importers.pt2 import changed

    specs = program.graph_signature.output_specs
    returned = next(node for node in program.graph.nodes if node.op == "output")
    kept = [at for at, spec in enumerate(specs) if spec.kind is not OutputKind.USER_INPUT_MUTATION]
    new = changed(program)
    returned.args = (tuple(returned.args[0][at] for at in (*kept, *new)),)
    specs[:] = [*(specs[at] for at in kept), *(OutputSpec(OutputKind.USER_OUTPUT, specs[at].arg, None) for at in new)]
    count = sum(spec.kind is OutputKind.USER_OUTPUT for spec in specs)
    program.module_call_graph[0].signature.out_spec = tree_structure(tuple(range(count)))
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def shared_out(graph_module: Any) -> dict[str, Any]:
    """How a lowered graph is shared out between backends and ExecuTorch's own kernels: see :func:`build`."""
    delegated: Counter[str] = Counter()
    undelegated: Counter[str] = Counter()
    backends: dict[str, None] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and hasattr(part := getattr(graph_module, node.target), "backend_id"):
            backends[part.backend_id] = None
            delegated.update(_operators(part.original_module.graph))
    undelegated.update(_operators(graph_module.graph))
    return {
        "backends": list(backends),
        "delegated": dict(sorted(delegated.items())),
        "undelegated": dict(sorted(undelegated.items())),
    }


def _operators(graph: Any) -> list[str]:
    names = (_name(node.target) for node in graph.nodes if node.op == "call_function")
    return [name for name in names if name not in _NO_WORK]


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))
