"""All fuzzers, by name."""

from __future__ import annotations

from fuzzing import (
    agent,
    channel,
    consoles,
    farm_files,
    files,
    frames,
    framework_models,
    gateway,
    liar,
    meters,
    microcontrollers,
    publishing,
    stored,
    texts,
    verdicts,
)
from fuzzing.engine import Fuzzer

FUZZERS: dict[str, Fuzzer] = {
    one.name: one
    for one in (
        *(agent.FUZZER, gateway.FUZZER, channel.FUZZER, liar.FUZZER, publishing.FUZZER, verdicts.FUZZER),
        *consoles.FUZZERS,
        *frames.FUZZERS,
        *farm_files.FUZZERS,
        *files.FUZZERS,
        *framework_models.FUZZERS,
        *microcontrollers.FUZZERS,
        *stored.FUZZERS,
        *meters.FUZZERS,
        *texts.FUZZERS,
    )
}

# Importer of a model's format (hil.controller.models.importers) -> the fuzzer that attacks it.
MODEL_FUZZERS = {
    **{"onnx": "onnx", "mlir": "mlir", "vmfb": "vmfb", "tflite": "tflite", "pte": "executorch", "hilb": "bundles"},
    **{"pt2": "pt2", "tf": "graphdef", "keras": "keras"},
}
# Importer -> why no fuzzer attacks it.
NOT_FUZZED = {"so": "the dynamic linker reads it, as part of running the program"}
