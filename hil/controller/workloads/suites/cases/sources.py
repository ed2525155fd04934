"""Suite sources: ``@operators``, ``@models``, or models in a path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.flow_registry import check_flow, load_flow
from hil.controller.storage.paths import is_folder, path_exists
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.cases.model_cases import LayerChoice, make_cases
from hil.controller.workloads.suites.cases.model_scan import scan_models
from hil.controller.workloads.suites.cases.operators import make_operator_cases
from hil.controller.workloads.suites.cases.spec import CaseSpec, Suite
from hil.controller.workloads.suites.cases.torch_cases import make_torch_cases, starts_from_torch
from hil.controller.workloads.suites.request import BUILT_IN, SuiteRequest
from hil.controller.workloads.suites.zoo import build_zoo_models
from hil.errors import UsageError, did_you_mean

EXPECTED = "expected.toml"
_SHIPPED = Path(__file__).parents[1] / "expected_lists"


def choose_flow(request: SuiteRequest, beside: Path = Path(), *, trusted: bool = False) -> Flow:
    """Return the flow of a request, with the requested runtime.

    Args:
        beside, trusted: see :func:`hil.controller.models.flows.flow_registry.load_flow`,
            whose errors this function raises.
    """
    flow = load_flow(request.flow, beside, trusted=trusted).with_runtime(request.runtime)
    if request.runtime:
        check_flow(flow, f"--runtime {request.runtime}")
    return flow


def choose_common_flow(specs: Iterable[CaseSpec], flow: Flow) -> Flow:
    """Return the flow of all cases, or the suite's flow if the cases have multiple flows."""
    first, *others = [spec.flow or flow for spec in specs] or [flow]
    return first if all(other == first for other in others) else flow


def open_suite(request: SuiteRequest, flow: Flow, context: RunContext) -> Suite:
    """Open a suite, with the cases in order. This function reads models to find layers, but does not compile them.

    The source is one of:

    - ``@operators`` (node tests of the installed onnx) or ``@models`` (hil's models). For flows that start from
      PyTorch, both names select the tests of ExecuTorch's backend tester.
    - The file of a model.
    - A directory: all models in the directory and in subdirectories, except hidden files.

    A model may have accompanying files in the same directory: ``NAME.inputs.npz``, ``NAME.expected.npz`` (input or
    output -> tensor) and ``NAME.calibration.npz`` (input -> stacked tensors).

    Args:
        flow: the recipe is applied to a model before the model is cut into layers.

    Returns:
        The suite. The suite has no cases if a directory contains no models.

    Raises:
        UsageError: the suite, file or directory does not exist, or the file is not a model.
    """
    source = request.source
    own = BUILT_IN.get(source, "")
    if own and starts_from_torch(flow):
        return Suite(own, source, make_torch_cases(own, flow, context), _SHIPPED / f"{own}_torch.toml")
    if own == "operators":
        return Suite(own, source, make_operator_cases(flow, context), _SHIPPED / "operators.toml")
    choice = LayerChoice(request.group, request.layer_inputs, request.merge) if request.layers else None
    how: dict[str, Any] = {"layers": choice, "settings": request.settings, "dims": request.dims}
    how["is_default_flow"] = request.yields_flow
    if own == "models":
        return Suite(own, source, make_cases(build_zoo_models(context), flow, context, **how), _SHIPPED / "models.toml")
    path = Path(source)
    if not path_exists(path):
        raise UsageError(f"suite, model or directory {source!r} not found", hint=make_source_hint(source))
    folder = path if path.is_dir() else path.parent
    found = scan_models(path)
    name = path.stem if path.is_file() else path.resolve().name
    cases = make_cases(found.models, flow, context, **how)
    return Suite(name, source, cases, folder / EXPECTED, tuple(found.left_out))


def make_source_hint(source: str) -> str:
    """Return the hint for a source that is neither a built-in suite nor a path."""
    path = Path(source)
    beside = sorted(path.parent.iterdir()) if is_folder(path.parent) else []
    known = [*BUILT_IN, *(str(one) for one in beside if not one.name.startswith("."))]
    return f"{did_you_mean(source, known)}{', '.join(BUILT_IN)}, or the path of a model or directory"


def place_of(source: str) -> str:
    """Return the absolute path of a suite's models; "" for built-in suites."""
    return "" if source in BUILT_IN else str(Path(source).resolve())
