"""The faults of examples/decoder on simulators, and right variants beside themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from support.commands import Ended
from support.decoder import DECODER, import_make

from hil.core.config_files import parse_toml

RUNTIMES = ["onnxruntime", "iree"]
SIM = ("--runtime-hw-type", "sim")

# Fault of make.py -> outcome, and fault of the record: kind, position, step, layer, tensor, phase. The prompt has 16
# tokens, and steps count from 1.
FAULTS: dict[str, tuple[str, tuple[Any, ...] | None]] = {
    "slot": ("FAIL", ("slot", 40, 25, None, "present.0.value", "decode only")),
    "swap": ("PASS", None),
    "mask_next": ("FAIL", ("mask", 0, 0, None, "present.1.value", "prefill only")),
    "mask_newest": ("FAIL", ("mask", 1, 0, None, "present.1.value", "")),
    "rope": ("FAIL", ("position", 48, 33, None, "present.0.key", "")),
    "overflow": ("FAIL", ("overflow", 56, 41, 2, "present.3.key", "")),
    "layer": ("FAIL", ("layer", 50, 35, 2, "present.3.value", "decode only")),
    "column": ("FAIL", ("head", 0, 0, None, "logits", "")),
}
STALE = ("UNSTABLE", ("stale cache", 0, 0, None, "logits", ""))
SWAPPED = "cache entries from position 39 are in another order than in the reference"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    return import_make()


@pytest.fixture
def generate(hil: Callable[..., Ended], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a model with the first prompt and the 64 tokens after it. Return the case."""

    def call(model: Path, *options: str, reference: Path | None = None) -> dict[str, Any]:
        (prompt, *_) = read_prompts()
        lines = ["steps = 64", f'reference = "{reference}"' if reference else ""]
        lines += ["[[prompt]]", f"tokens = {prompt['tokens']}", f"forced = {prompt['forced']}"]
        (tmp_path / "spec.toml").write_text("\n".join(lines))
        ended = hil("run", model, "--generate", "spec.toml", *options, "--json")
        assert ended.code == (ended.case["outcome"] != "PASS"), ended.case
        return ended.case

    return call


def verdict_of(case: dict[str, Any]) -> tuple[str, tuple[Any, ...] | None]:
    """Return the outcome and the fault of a case, in the form of :data:`FAULTS`."""
    fault = case["generation"]["fault"]
    order = ("kind", "position", "step", "layer", "tensor", "phase")
    return case["outcome"], fault and tuple(fault[name] for name in order)


def read_prompts() -> list[dict[str, Any]]:
    path = DECODER / "generate.toml"
    prompts: list[dict[str, Any]] = parse_toml(path.read_text(), path)["prompt"]
    return prompts


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("fault", FAULTS)
def test_generation_names_fault_of_model(
    generate: Callable[..., dict[str, Any]],
    make: ModuleType,
    runtime: str,
    fault: str,
    tmp_path: Path,
) -> None:
    onnx.save(make.Decoder(make.load_weights(), fault=fault).build(), tmp_path / f"{fault}.onnx")
    model = DECODER / "decoder.onnx"
    case = generate(Path(f"{fault}.onnx"), "--runtime", runtime, *SIM, reference=model)
    assert verdict_of(case) == FAULTS[fault], case["reason"]
    assert case["generation"]["notes"] == ([SWAPPED] if fault == "swap" else [])


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_generation_names_stale_cache(generate: Callable[..., dict[str, Any]], runtime: str) -> None:
    case = generate(DECODER / "decoder.onnx", "--runtime", runtime, *SIM, "--fault", "stale_cache")
    assert verdict_of(case) == STALE, case["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "int4"])
def test_generation_of_variant_passes(
    generate: Callable[..., dict[str, Any]], make: ModuleType, dtype: str, tmp_path: Path
) -> None:
    onnx.save(make.Decoder(make.load_weights(), dtype).build(), tmp_path / "variant.onnx")
    case = generate(Path("variant.onnx"), "--runtime", "onnxruntime", *SIM)
    assert case["outcome"] == "PASS", case["reason"]
