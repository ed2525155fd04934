"""Where suites come from: ``operators``, ``models``, or a path of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hil.controller.models.flows import Flow
from hil.controller.pipeline.case import Workshop
from hil.controller.storage.paths import exists
from hil.controller.workloads.suites.folder import look
from hil.controller.workloads.suites.model_cases import LayerChoice, cases_of
from hil.controller.workloads.suites.operators import operator_cases
from hil.controller.workloads.suites.spec import Suite
from hil.controller.workloads.suites.torch_cases import starts_from_torch, torch_cases
from hil.controller.workloads.suites.zoo import zoo_models
from hil.errors import UsageError, did_you_mean

BUILT_IN = ("operators", "models")
EXPECTED = "expected.toml"
_SHIPPED = Path(__file__).parent / "expected_lists"


def open_suite(
    source: str,
    flow: Flow,
    shop: Workshop,
    *,
    layers: bool = True,
    group: str = "node",
    layer_inputs: str = "real",
    merge: str = "content",
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
) -> Suite:
    """The cases of a suite, in order. Nothing is compiled yet; models are read, to know their layers.

    Args:
        source: ``operators`` (the node tests of the installed onnx), ``models`` (hil's own), both of ExecuTorch's
            backend tester for a flow that starts from PyTorch; a model's file, or a folder: every model in it and
            below, but for hidden files. Beside a model may lie ``NAME.inputs.npz``, ``NAME.expected.npz`` (input or
            output -> tensor) and ``NAME.calibration.npz`` (input -> tensors, stacked).
        flow: what models are made into: a flow's recipe is applied before a model is cut into layers.
        shop: the cache, and processes to read models in.
        layers: a case for each layer of a model, besides the one for the whole.
        group: what a layer is: ``node`` or ``fused``; see :func:`hil.controller.analysis.layers.layers_of`.
        layer_inputs: ``real`` (what the reference computed for the whole model) or ``random``.
        merge: which layers are one case: see :func:`hil.controller.analysis.layers.unmerged`.
        seed: of random inputs.
        dims: values of symbolic dimensions, for the models that have them.

    Returns:
        The suite; it has no cases where a folder holds no models.

    Raises:
        UsageError: there is no such suite, file or folder, or the file is no model.
    """
    if source in BUILT_IN and starts_from_torch(flow):
        return Suite(source, source, torch_cases(source, flow, shop), _SHIPPED / f"{source}_torch.toml")
    if source == "operators":
        return Suite(source, source, operator_cases(flow, shop), _SHIPPED / "operators.toml")
    choice = LayerChoice(group, layer_inputs, merge) if layers else None
    if source == "models":
        cases = cases_of(zoo_models(shop), flow, shop, layers=choice, seed=seed, dims=dims)
        return Suite(source, source, cases, _SHIPPED / "models.toml")
    path = Path(source)
    if not exists(path):
        raise UsageError(
            f"there is no suite, model or folder {source!r}",
            hint=f"{did_you_mean(source, _known(path))}{', '.join(BUILT_IN)}, or the path of a model or a folder",
        )
    folder = path if path.is_dir() else path.parent
    found = look(path)
    cases = cases_of(found.models, flow, shop, layers=choice, seed=seed, dims=dims)
    name = path.stem if path.is_file() else path.resolve().name
    return Suite(name, source, cases, folder / EXPECTED, tuple(found.left_out))


def _known(path: Path) -> list[str]:
    """What could have been meant: a suite, or what lies where the path points to."""
    beside = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    return [*BUILT_IN, *(str(one) for one in beside if not one.name.startswith("."))]
