"""Small models of real architectures: graphs built in code, with reproducible random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hil.controller.storage.cache import Cache
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.tensor_files import load_npz
from hil.controller.workloads.suites.cases.spec import SuiteModel
from hil.controller.workloads.suites.zoo import networks
from hil.controller.workloads.suites.zoo.graph_builder import GraphBuilder
from hil.core.digest import digest_of
from hil.core.examples import find_examples_folder
from hil.core.installed import get_version
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array

MAKE_TIMEOUT_SECONDS = 300.0
_HERE = Path(__file__).parent

# Name -> function that adds the model to a graph, in the suite's order.
BUILDERS = {
    one.__name__: one
    for one in (
        networks.mlp,
        networks.resnet,
        networks.mobilenet,
        networks.squeeze_excite,
        networks.unet,
        networks.pooling_mix,
        networks.siamese,
        networks.quantised_cnn,
        networks.transformer,
        networks.decoder,
        networks.mixer,
        networks.recommender,
        networks.dynamic_attention,
        networks.lstm,
        networks.gru,
        networks.bidirectional_lstm,
        networks.wavenet,
        networks.branches,
        networks.loop,
        networks.scan,
        networks.half,
        networks.bfloat16,
        networks.double,
        networks.integers,
        networks.beam_step,
    )
}
DIMS: Mapping[str, Mapping[str, int]] = {"dynamic_attention": {"batch": 2, "time": 7}, "digits_cnn_batch": {"N": 4}}
# Tolerances for whole models with low precision: sums near zero are mostly rounding errors.
ATOL = {"half": 4e-3, "bfloat16": 3e-2}
_DIGITS_MODELS = ("digits_cnn", "digits_cnn_int8", "digits_cnn_batch")


def build_zoo_models(context: RunContext) -> list[SuiteModel]:
    """Return the models of the suite ``models``, in order. Built models are cached."""
    sources = "".join(file.read_text() for file in sorted(_HERE.glob("*.py")))
    key = Cache.key("zoo", onnx=get_version("onnx"), sources=digest_of(sources.encode()))

    def make(folder: Path) -> None:
        with make_temporary_folder("hil-zoo-") as scratch:
            log = Path(scratch) / "build.log"
            context.isolated.call(build, {"folder": str(folder)}, timeout=MAKE_TIMEOUT_SECONDS, log=log)

    entry, _ = context.cache.get_or_make(key, {"model": "the suite models"}, make)
    built = [SuiteModel(name, entry / f"{name}.onnx", DIMS.get(name, {}), atol=ATOL.get(name)) for name in BUILDERS]
    return [*built, *map(_create_digits_model, _DIGITS_MODELS)]


def build(folder: str) -> None:
    """Write the built models as ``<name>.onnx`` to a directory. Runs in a separate process."""
    import onnx

    for name, builder in BUILDERS.items():
        graph = GraphBuilder(name)
        builder(graph)
        onnx.save(graph.model(), Path(folder) / f"{name}.onnx")


def _create_digits_model(name: str) -> SuiteModel:
    folder = find_examples_folder()
    count = DIMS.get(name, {}).get("N", 1)

    def load_images() -> Array:
        return load_npz(folder / "digits_test.npz")["image"]

    return SuiteModel(
        name,
        folder / f"{name}.onnx",
        DIMS.get(name, {}),
        given=lambda: {"image": load_images()[:count]},
        calibration=lambda: [
            {"image": load_images()[start : start + count]} for start in range(count, 64 - count, count)
        ],
    )
