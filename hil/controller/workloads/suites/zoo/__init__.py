"""Small but true architectures: their graphs are built in code, their weights are random, the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hil.controller.pipeline.case import Workshop
from hil.controller.storage.cache import Cache
from hil.controller.storage.tensor_files import load_npz
from hil.controller.storage.versions import version
from hil.controller.workloads.suites.model_cases import SuiteModel
from hil.controller.workloads.suites.zoo import dtypes, language, sequences, vision
from hil.core.digest import digest_of
from hil.core.scratch import temporary_folder
from hil.core.tensors import Array

MAKE_TIMEOUT_S = 300.0
_HERE = Path(__file__).parent
# In a checkout the digits' models lie with the examples; in a wheel they lie inside it.
_DIGITS = (_HERE / "digits", _HERE.parents[4] / "examples" / "digits")

# Name -> function that builds it, in the suite's order. Those of the digits are files: they were trained.
BUILDERS: Mapping[str, Callable[[], Any]] = {
    "mlp": language.mlp,
    "resnet": vision.resnet,
    "mobilenet": vision.mobilenet,
    "squeeze_excite": vision.squeeze_excite,
    "unet": vision.unet,
    "pooling_mix": vision.pooling_mix,
    "siamese": vision.siamese,
    "quantised_cnn": vision.quantised_cnn,
    "transformer": language.transformer,
    "decoder": language.decoder,
    "mixer": language.mixer,
    "recommender": language.recommender,
    "dynamic_attention": language.dynamic_attention,
    "lstm": sequences.lstm,
    "gru": sequences.gru,
    "bidirectional_lstm": sequences.bidirectional_lstm,
    "wavenet": sequences.wavenet,
    "branches": sequences.branches,
    "loop": sequences.loop,
    "scan": sequences.scan,
    "half": dtypes.half,
    "bfloat16": dtypes.bfloat16,
    "double": dtypes.double,
    "integers": dtypes.integers,
    "beam_step": dtypes.beam_step,
}
DIMS: Mapping[str, Mapping[str, int]] = {"dynamic_attention": {"batch": 2, "time": 7}, "digits_cnn_batch": {"N": 4}}
# What a whole model of few bits may differ by: where its sums come out near zero, rounding is all that is left of them.
ATOL = {"half": 4e-3, "bfloat16": 3e-2}
_DIGITS_MODELS = ("digits_cnn", "digits_cnn_int8", "digits_cnn_batch")


def zoo_models(shop: Workshop) -> list[SuiteModel]:
    """The models of the suite ``models``, in order; those that are built are built once and kept in the cache.

    Args:
        shop: the cache, and a process to build them in.

    Raises:
        StorageError: the cache cannot be written.
    """
    sources = "".join(file.read_text() for file in sorted(_HERE.glob("*.py")))
    key = Cache.key("zoo", onnx=version("onnx"), sources=digest_of(sources.encode()))

    def make(folder: Path) -> None:
        with temporary_folder("hil-zoo-") as scratch:
            log = Path(scratch) / "build.log"
            shop.isolated.call(build, {"folder": str(folder)}, timeout=MAKE_TIMEOUT_S, log=log)

    entry, _ = shop.cache.get_or_make(key, {"model": "the suite models"}, make)
    built = [SuiteModel(name, entry / f"{name}.onnx", DIMS.get(name, {}), atol=ATOL.get(name)) for name in BUILDERS]
    return [*built, *map(_digits_model, _DIGITS_MODELS)]


def build(folder: str) -> None:
    """Write every model that is built as ``<name>.onnx`` into a folder. Runs in a process of its own."""
    import onnx

    for name, builder in BUILDERS.items():
        onnx.save(builder(), Path(folder) / f"{name}.onnx")


def _digits_model(name: str) -> SuiteModel:
    folder = next((one for one in _DIGITS if one.is_dir()), _DIGITS[0])
    count = DIMS.get(name, {}).get("N", 1)

    def images() -> Array:
        return load_npz(folder / "digits_test.npz")["image"]

    return SuiteModel(
        name,
        folder / f"{name}.onnx",
        DIMS.get(name, {}),
        given=lambda: {"image": images()[:count]},
        calibration=lambda: [{"image": images()[start : start + count]} for start in range(count, 64 - count, count)],
    )
