"""Every built-in flow from model to verdict, against its reference and the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.flow_models import attention, mlp, residual_cnn
from support.models import DIGITS
from support.slow import slow_except

import hil
from hil.controller.devices.board import Board
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.flow_registry import load_flow, load_flows
from hil.controller.models.flows.quanta import compute_quantum_atol
from hil.controller.models.flows.recipe import apply_recipe
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import make_inputs
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Options
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.core.results import Outcome
from hil.core.tensors import Array

CNN = DIGITS / "digits_cnn.onnx"
STATIC = "static-int8-per-channel"


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    with Isolated(2) as isolated:
        yield RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture(scope="module")
def board() -> Iterator[Board]:
    with hil.connect("sim") as connected:
        yield connected


@pytest.fixture(scope="module")
def images() -> list[dict[str, Array]]:
    with np.load(DIGITS / "digits_test.npz") as held_out:
        return [{"image": image[None]} for image in held_out["image"]]


@pytest.fixture
def take(context: RunContext, board: Board, tmp_path: Path) -> Callable[..., Case]:
    """Return a function that runs a model in a flow and returns the finished case."""

    def call(flow: Flow, model: Path, inputs: dict[str, Array], samples: list[dict[str, Array]]) -> Case:
        log = tmp_path / "prepare.log"
        path = apply_recipe(flow, model, samples, context, log)
        atol = flow.atol if flow.quanta is None else compute_quantum_atol(flow, path, context, log)
        options = Options(
            runtime=flow.runtime,
            compiler=flow.compiler,
            compile_flags=flow.compile_flags,
            inputs=inputs,
            plain_model=model if path != model else None,
            min_sqnr_db=flow.min_sqnr_db,
            rtol=flow.rtol,
            atol=atol,
        )
        folder = tmp_path / flow.name
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        runner = Runner(context)
        return runner.run_on_board(runner.begin(path, options, folder), BoardSession(board))

    return call


def random_inputs(model: Path, context: RunContext, seed: int) -> dict[str, Array]:
    read = import_model(model, isolated=context.isolated, cache=context.cache)
    return make_inputs(read.inputs or (), {}, seed=seed, ranges=read.ranges)


@pytest.mark.parametrize(
    "name",
    slow_except([name for name, flow in load_flows().items() if flow.runtime in ("iree", "onnxruntime")], 0, 4, 8),
)
def test_digits_model_passes_in_every_flow(take, images, name: str):
    flow = load_flow(name)
    case = take(flow, CNN, images[40], images[:8])
    assert case.outcome is Outcome.PASS, (case.reason, case.error)
    assert case.verdicts[0].outcome is Outcome.PASS
    if not flow.recipe:
        assert case.plain_verdict is None
        return
    assert flow.min_sqnr_db
    assert case.plain_verdict is not None
    (beside_plain,) = case.plain_verdict.outputs
    assert beside_plain.sqnr_db is not None
    assert flow.min_sqnr_db < beside_plain.sqnr_db < 100  # near the plain model but different


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"),
    [
        (f"iree-{STATIC}", residual_cnn),
        (f"iree-{STATIC}", mlp),  # off by a single step
        (f"iree-{STATIC}", attention),  # off by several steps
        ("iree-dynamic-int8", attention),
        ("iree-f16", attention),
    ],
)
def test_iree_flows_pass_other_networks(take, context, tmp_path: Path, name: str, make):
    model = make(tmp_path / "net.onnx")
    case = take(load_flow(name), model, random_inputs(model, context, seed=1000), [])
    assert case.outcome is Outcome.PASS, (case.reason, case.error)


@pytest.mark.slow
def test_poor_calibration_fails_against_plain_model(take, images):
    flow = load_flow(f"iree-{STATIC}")
    brighter = [{"image": sample["image"] * 25} for sample in images[:8]]
    case = take(flow, CNN, images[40], brighter)
    assert case.verdicts[0].outcome is Outcome.PASS  # the program matches the badly quantized model
    assert case.outcome is Outcome.FAIL
    assert "dB SQNR against the model before the recipe" in case.reason


def test_flow_fails_output_beyond_quantization_steps(take, context, images, tmp_path: Path):
    flow = load_flow(f"onnxruntime-{STATIC}")
    path = apply_recipe(flow, CNN, images[:8], context, tmp_path / "log")
    atol = compute_quantum_atol(flow, path, context, tmp_path / "log")
    right = take(flow, CNN, images[40], images[:8])
    (answer,) = right.references[0].outputs.values()  # may saturate on the board
    for share, outcome in ((0.99, Outcome.PASS), (1.3, Outcome.FAIL)):
        moved = {"logits": (answer + np.float32(share * atol)).astype(np.float32)}
        again = replace(right, result=replace(right.result, outputs=moved), outcome=None)
        assert Runner(context).judge(again).outcome is outcome


def test_iree_o3_flow_passes_optimization_level(take, images):
    case = take(load_flow("iree-O3"), CNN, images[40], [])
    assert "--iree-opt-level=O3" in case.artifact.flags
    assert case.outcome is Outcome.PASS


def test_iree_int8_flow_runs_int8_weights(take, images):
    case = take(load_flow(f"iree-{STATIC}"), CNN, images[40], images[:8])
    weights = [one for one in onnx.load(case.path).graph.initializer if one.name.endswith("weight_quantized")]
    assert len(weights) == 3
    assert {one.data_type for one in weights} == {onnx.TensorProto.INT8}
