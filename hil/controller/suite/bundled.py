"""What ExecuTorch bundled with a program as its first test case, in the words of a suite's model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hil.errors import UsageError
from hil.executorch_file import is_bundle, mapped, pick_method, read_cases, read_methods
from hil.flatbuffer import Damaged
from hil.tensors import Array


def bundled(file: Path, outputs: bool) -> Mapping[str, Array]:
    """The inputs, or the outputs that are expected, of the first case of a ``.bpte``; ``hil bundle run`` runs them all.

    Args:
        file: whatever file; one that bundles nothing has none.
        outputs: the outputs are meant.

    Returns:
        Name -> tensor, under the names that hil has for a program's: ``input0``, ``output0``.

    Raises:
        UsageError: it is damaged, or its case has not what its method takes and gives.
    """
    try:
        data = mapped(file)
        if not is_bundle(data):
            return {}
        method = pick_method(read_methods(data), "")
        cases = [] if method is None else read_cases(data).get(method.name, [])
        if method is None or not cases:
            return {}
        specs = method.output_specs() if outputs else method.input_specs()
        values = cases[0].expected_outputs if outputs else cases[0].inputs
        return {spec.name: np.asarray(values[place]) for place, spec in specs}
    except IndexError as error:
        raise UsageError(f"{file.name}: its first case has too few {'outputs' if outputs else 'inputs'}") from error
    except (OSError, Damaged) as error:
        raise UsageError(f"{file.name} cannot be read: {error}") from error
