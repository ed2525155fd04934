"""Override default values of inputs in ONNX models. A default value is an initializer with the name of an input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hil.controller.models.importers import IMPORT_TIMEOUT_SECONDS, import_model
from hil.controller.models.inputs import digest_of_samples, parse_input, refuse_misfit
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import convert_errors, make_function_version
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.core.files import copy_file
from hil.core.results import Model
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array, TensorSpec
from hil.errors import ImportFailed
from hil.formats.onnx_file import load_onnx


def list_default_specs(model: Model) -> tuple[TensorSpec, ...]:
    """Return the inputs with a default value. ``model.inputs`` does not include them."""
    return tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in model.producer.get("defaults", ()))


def add_given_defaults(
    model: Model, given: Mapping[str, Array] | Sequence[str], context: RunContext
) -> tuple[Model, Mapping[str, Array] | Sequence[str]]:
    """Return the model with given tensors as default values, and the remaining given inputs.

    Args:
        model: the model.
        given: name -> tensor, or texts of ``--input``. Texts contain a name, or follow the order of the inputs; inputs
            with a default value are last.
        context: cache and isolated processes.

    Raises:
        UsageError: a tensor does not match the dtype or shape, or a file is unreadable.
        ImportFailed, StageTimeout: rewriting the model failed.
    """
    defaults = list_default_specs(model)
    if not given or not defaults or model.inputs is None:
        return model, given
    specs = (*model.inputs, *defaults)
    chosen: dict[str, Array] = {}
    if isinstance(given, Mapping):
        chosen |= given
    else:
        for text in given:
            chosen |= parse_input(text, [spec for spec in specs if spec.name not in chosen], strict=True)
    names = {spec.name for spec in defaults}
    tensors = {name: array for name, array in chosen.items() if name in names}
    if not tensors:
        return model, given
    rest = {name: array for name, array in chosen.items() if name not in names}
    return override_defaults(model, tensors, context), rest


def override_defaults(model: Model, tensors: Mapping[str, Array], context: RunContext) -> Model:
    """Return a copy of the model with new default values.

    Raises:
        UsageError: a tensor does not match the input's dtype or shape.
        ImportFailed, StageTimeout: rewriting the model failed.
    """
    for spec in list_default_specs(model):
        if spec.name in tensors:
            refuse_misfit(spec, tensors[spec.name])
    digest = digest_of_samples([tensors])
    key = Cache.key(
        "defaults", model=model.digest, file=model.path.name, tensors=digest, write=make_function_version(write)
    )

    def make(folder: Path) -> None:
        with make_temporary_folder("hil-defaults-") as scratch:
            save_tensors(Path(scratch), tensors)
            arguments = {"model": str(model.path.absolute()), "tensors": scratch, "folder": str(folder)}
            failed = f"cannot replace the default values of {model.path.name}"
            with convert_errors("import", "replacing default values", ImportFailed, failed):
                log = Path(scratch) / "write.log"
                context.isolated.call(write, arguments, timeout=IMPORT_TIMEOUT_SECONDS, log=log)
        for name, file in model.files.items():
            if file != model.path:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                copy_file(file, folder / name)

    entry, _ = context.cache.get_or_make(key, {"model": model.name}, make)
    made = import_model(
        entry / model.path.name,
        function=model.function,
        dims=model.dims,
        format=model.format,
        isolated=context.isolated,
        cache=context.cache,
    )
    return replace(made, name=model.name)


def write(model: str, tensors: str, folder: str) -> None:
    """Write the model with these tensors as initializers into a directory. Runs in the isolated process."""
    import onnx
    from onnx import numpy_helper

    proto = load_onnx(model)
    given = load_tensors(Path(tensors))
    kept = [tensor for tensor in proto.graph.initializer if tensor.name not in given]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in given.items())
    onnx.save(proto, Path(folder) / Path(model).name)
