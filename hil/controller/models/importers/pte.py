"""ExecuTorch's programs, ``.pte`` and ``.bpte``: the signature of one of their methods, read without ExecuTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.errors import ImportFailed, UsageError
from hil.formats.executorch_file import Damaged, is_bundle, mapped, pick_method, read_methods


def describe(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read a method's signature.

    The file has no names: inputs are ``input0``, ``input1``..., outputs ``output0``... in order. Of a tensor whose
    shape may vary it does not say which dimensions do: each is open, under names such as ``input0.dim0``. Numbers that
    a method takes are part of the program, which refuses others; they are listed in ``producer``.

    Raises:
        ImportFailed: this is no such file, or a damaged one, or its method takes or gives what is no tensor.
        UsageError: there is no such method or dimension, or several methods and none is named.
    """
    file = Path(path)
    try:
        data = mapped(file)
        methods = read_methods(data)
        method = pick_method(methods, function)
        if method is None:
            said = f"has no method {function!r}" if function else f"has {len(methods)} methods and none is forward"
            raise UsageError(f"{file.name} {said}", hint=f"--function with one of {', '.join(methods) or 'none'}")
        inputs, outputs = ([spec for _, spec in found] for found in (method.input_specs(), method.output_specs()))
    except Damaged as error:
        raise ImportFailed(
            f"{file.name}: {error}", hint="a .pte is what ExecuTorch's to_executorch() writes"
        ) from error
    if not outputs:
        raise ImportFailed(f"{file.name} returns no tensor", hint="a program that returns nothing cannot be checked")
    open_dims = {dim for spec in inputs for dim in spec.shape if isinstance(dim, str)}
    if unknown := [name for name in dims if name not in open_dims]:
        have = ", ".join(sorted(open_dims)) or "none: every dimension is fixed"
        raise UsageError(f"{file.name} has no dimension {unknown[0]!r}", hint=f"its symbolic dimensions: {have}")
    return {
        "function": method.name,
        "inputs": [
            [spec.name, spec.dtype, [dims.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape]]
            for spec in inputs
        ],
        "outputs": [[spec.name, spec.dtype, list(spec.shape)] for spec in outputs],
        "ranges": {},
        "external": [],
        "producer": {
            "name": "executorch",
            "bundled": is_bundle(data),
            "methods": list(methods),
            "backends": list(method.backends),
            "operators": list(method.operators),
            "unseen_state": list(method.writers),
            "constants": [value.constant for value in method.inputs if value.constant is not None],
            "most": {
                spec.name: list(method.inputs[place].sizes)
                for place, spec in method.input_specs()
                if method.inputs[place].dynamic
            },
        },
    }
