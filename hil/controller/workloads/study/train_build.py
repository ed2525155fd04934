"""Code of a study for isolated processes: TensorFlow's eager training, and lowering a step for IREE."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hil.controller.backends.references.noise import FAR, FAR_RUNS, RUNS, compute_noise, perturb_inputs
from hil.controller.models.conversions.tensorflow_program import prepare
from hil.controller.models.tensorflow.graphs import format_error
from hil.controller.models.tensorflow.lower import lower_function
from hil.controller.models.tensorflow.source import open_model
from hil.controller.storage.tensor_files import save_tensors
from hil.errors import CompileFailed, HilError, ImportFailed, ReferenceFailed

STEP = "step"
# Entries in :func:`train`'s directory: the model, and every step's inputs, outputs and noise.
SAVED, BATCH, RESULT, NOISE = "saved", "batch-{}", "result-{}", "noise-{}"
# Files in :func:`lower_step`'s directory.
MLIR, SIGNATURE, VALUES = "step.mlir", "step.json", "values"


def train(model: str, seed: int, steps: int, folder: str) -> None:
    """Save the model of an experiment before the training, then train it eagerly in TensorFlow.

    Args:
        model: model.py of the experiment. ``training(random)`` returns a module with two members. The tf.function
            ``step`` has fixed shapes and returns outputs by name. ``batches(random)`` yields the arguments of all
            calls.
        seed: seed of initial values and data.
        folder: directory for the SavedModel, the batches, and every step's outputs and variables (``variable NAME``)
            with their noise. To measure the noise, the training is repeated from values with added rounding errors.

    Raises:
        ImportFailed: the experiment is invalid.
        ReferenceFailed: TensorFlow or the experiment failed.
    """
    try:
        _train(Path(model), seed, steps, Path(folder))
    except HilError:
        raise
    except Exception as error:  # experiments and TensorFlow may raise any exception
        raise ReferenceFailed(f"the experiment failed: {format_error(error)}", detail=str(error)) from error


def _train(model: Path, seed: int, steps: int, where: Path) -> None:
    import numpy as np
    import tensorflow as tf

    made = _load(model).training(np.random.default_rng(seed))
    batches = list(itertools.islice(made.batches(np.random.default_rng(seed + 1)), steps))
    tf.saved_model.save(made, str(where / SAVED), signatures={STEP: made.step})
    concrete = made.step.get_concrete_function()
    names = [spec.name for spec in concrete.structured_input_signature[0]]
    # The saved model also uses these names for variables: see hil.controller.models.tensorflow.lower.
    captured = {id(tensor) for tensor in concrete.captured_inputs}
    # Also add variables that a step accesses only by handle, as TensorFlow 1 optimizers do. The graph does not list
    # them.
    reached = {id(one): one for one in (*concrete.graph.variables, *made.variables) if id(one.handle) in captured}
    variables = {str(variable.name).split(":")[0]: variable for variable in reached.values()}
    if len(variables) < len(reached):
        raise ImportFailed(f"{model}: two variables have the same name", hint="use a unique name for each module")
    # Set this back afterwards, because the worker process is reused.
    tf.config.run_functions_eagerly(True)
    first = {name: variable.numpy() for name, variable in variables.items()}

    def train_batches(given: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
        results = []
        for batch in given:
            outputs = {name: value.numpy() for name, value in made.step(*map(tf.constant, batch)).items()}
            state = {f"variable {name}": variable.numpy() for name, variable in variables.items()}
            results.append(outputs | state)
        return results

    def train_perturbed(seed: int, units: int) -> list[dict[str, Any]]:
        for name, value in perturb_inputs(first, seed, units).items():
            variables[name].assign(value)
        moved = [perturb_inputs(dict(zip(names, batch, strict=True)), seed, units) for batch in batches]
        return train_batches([list(one.values()) for one in moved])

    try:
        results = train_batches(batches)
        near = [train_perturbed(seed, 1) for seed in range(RUNS)]
        far = [train_perturbed(seed, FAR) for seed in range(FAR_RUNS)]
    finally:
        tf.config.run_functions_eagerly(False)
    for step, (batch, result) in enumerate(zip(batches, results, strict=True)):
        save_tensors(where / BATCH.format(step), dict(zip(names, batch, strict=True)))
        save_tensors(where / RESULT.format(step), result)
        noise = compute_noise(result, [run[step] for run in near], [run[step] for run in far])
        save_tensors(where / NOISE.format(step), noise)


def lower_step(saved: str, folder: str) -> None:
    """Write the step of a saved model as StableHLO for IREE, with the signature and the variables' values.

    Raises:
        CompileFailed: TensorFlow cannot lower the step.
    """
    source = open_model(saved, STEP, {})

    def call_flat(*tensors: Any) -> Any:
        return source.call(list(tensors))

    try:
        live = lower_function(call_flat, source.list_sized_inputs())
    except CompileFailed as error:
        # XLA's message begins with the unsupported operation, followed by a long location.
        lines = [line.strip() for line in error.detail.splitlines() if line.strip()]
        text = f"TensorFlow: {' '.join(lines)[:400]}" if lines else error.message
        raise CompileFailed(text, detail=error.detail) from error
    where, lowered = Path(folder), live.function
    (where / MLIR).write_text(prepare(lowered.mlir))
    names = [spec.name for spec in source.inputs]
    state = [{**asdict(state), "spec": asdict(state.spec)} for state in lowered.state]
    outputs = [spec.name for spec in source.outputs()]
    (where / SIGNATURE).write_text(json.dumps({"inputs": names, "outputs": outputs, "state": state}))
    values = zip(lowered.state, live.values(), strict=True)
    save_tensors(where / VALUES, {one.spec.name: value for one, value in values})


def _load(path: Path) -> Any:
    # Experiments import shared code from the parent directory.
    sys.path[:] = [str(path.parent.parent), *(entry for entry in sys.path if entry != str(path.parent.parent))]
    spec = importlib.util.spec_from_file_location(f"experiment_{path.parent.name}", path)
    if spec is None or spec.loader is None:
        raise ImportFailed(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "training"):
        raise ImportFailed(f"{path}: missing function training(random)")
    return module
