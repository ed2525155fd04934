"""Checks of a reference. The functions run in a worker process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.backends.references import Reference
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.controller.workloads.plugin_check.compilers import find_mistake, format_call_error
from hil.controller.workloads.plugin_check.entry_points import find_point
from hil.controller.workloads.plugin_check.rules import ContractFinding
from hil.controller.workloads.plugin_check.small_models import SMALL_MODELS, SmallModel, find_wrong_values
from hil.core.guarded import format_error
from hil.core.tensors import Array

_GROUP = "hil.references"
_CALL_SECONDS = 60.0


def check_reference(name: str, package: str, models: Sequence[str], folder: str) -> dict[str, Any]:
    """Compute the outputs of small models, and compare them with the right values.

    Args:
        models: ONNX files of :data:`SMALL_MODELS`, in this order.
        folder: a directory for tensors, the cache and logs.

    Returns:
        ``findings``; ``refused``: model -> error; ``computed``: models.
    """
    reference: Reference = find_point(_GROUP, name, package).load()
    found = _check_source(reference)
    if "onnx" not in reference.formats:
        why = "the reference has no format onnx"
        return {"findings": [one.to_json() for one in found], "refused": {"all": why}, "computed": []}
    refused, computed = {}, []
    with Isolated(1) as isolated:
        for model, path in zip(SMALL_MODELS, models, strict=True):
            try:
                outputs = _compute(reference, model, Path(path), Path(folder) / model.name, isolated)
            except BaseException as error:
                if mistake := find_mistake(error):
                    found.append(ContractFinding("reference", f"model {model.name}: unexpected {mistake}"))
                else:
                    refused[model.name] = format_call_error(error)
                continue
            computed.append(model.name)
            found += [ContractFinding("reference", f"model {model.name}: {text}") for text in _compare(model, outputs)]
    if len(refused) == len(SMALL_MODELS):
        text = "; ".join(f"{model}: {why}" for model, why in refused.items())
        return {"findings": [ContractFinding("reference", text).to_json()], "refused": {}, "computed": []}
    return {"findings": [one.to_json() for one in found], "refused": refused, "computed": computed}


def _check_source(reference: Reference) -> list[ContractFinding]:
    try:
        first, second = reference.source(), reference.source()
    except BaseException as error:
        return [ContractFinding("source", format_error(error))]
    if not isinstance(first, str) or not first.strip():
        return [ContractFinding("source", f"source() returned {first!r:.80}")]
    return [] if first == second else [ContractFinding("source", f"source() returned {first!r}, then {second!r}")]


def _compute(
    reference: Reference, model: SmallModel, path: Path, folder: Path, isolated: Isolated
) -> Mapping[str, Array]:
    given, outputs = folder / "inputs", folder / "outputs"
    for place in (given, outputs):
        place.mkdir(parents=True)
    save_tensors(given, model.inputs)
    settings: dict[str, Any] = {"isolated": isolated, "timeout": _CALL_SECONDS, "log": folder / "log"}
    settings["log"].touch()
    imported = import_model(path, isolated=isolated)
    reference.compute(imported, given, outputs, cache=Cache(folder / "cache"), recompute=False, **settings)
    return load_tensors(outputs)


def _compare(model: SmallModel, outputs: Mapping[str, Array]) -> list[str]:
    if tuple(outputs) != model.outputs:
        return [f"the outputs are {', '.join(outputs) or 'none'}, expected {', '.join(model.outputs)}"]
    wanted = model.compute(*model.inputs.values())
    found = []
    for (name, array), right in zip(outputs.items(), wanted, strict=True):
        if (array.dtype, array.shape) != (right.dtype, right.shape):
            found.append(f"output {name} is {array.shape} {array.dtype}, expected {right.shape} {right.dtype}")
        elif text := find_wrong_values(array, right):
            found.append(f"output {name} is {text}")
    return found
