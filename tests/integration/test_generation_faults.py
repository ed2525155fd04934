"""The faults of examples/decoder on simulators and on a board over SSH, and right decoders beside NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from support.commands import Ended
from support.decoder import DECODER, NumpyDecoder, import_make
from support.step_programs import save_summing_model, stale_function

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
SWAPPED = "cache entries from position 39 on have a different order than in the reference"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    return import_make()


@pytest.fixture(params=["sim", pytest.param("ssh", marks=pytest.mark.board)])
def where(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Options for a simulator, and for a board over SSH."""
    if request.param == "sim":
        return SIM
    board = request.getfixturevalue("board_x86")
    return ("--board", board.address, "--identity", str(board.identity), "--known-hosts", str(board.known_hosts))


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
    where: tuple[str, ...],
    runtime: str,
    fault: str,
    tmp_path: Path,
) -> None:
    onnx.save(make.Decoder(make.load_weights(), fault=fault).build(), tmp_path / f"{fault}.onnx")
    model = DECODER / "decoder.onnx"
    case = generate(Path(f"{fault}.onnx"), "--runtime", runtime, *where, reference=model)
    assert verdict_of(case) == FAULTS[fault], case["reason"]
    assert case["generation"]["notes"] == ([SWAPPED] if fault == "swap" else [])


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_generation_names_stale_cache(generate: Callable[..., dict[str, Any]], runtime: str) -> None:
    case = generate(DECODER / "decoder.onnx", "--runtime", runtime, *SIM, "--fault", "stale_cache")
    assert verdict_of(case) == STALE, case["reason"]


@pytest.mark.slow
def test_generation_names_stale_cache_inside_program(
    hil: Callable[..., Ended], where: tuple[str, ...], tmp_path: Path
) -> None:
    """The program adds up its entries in a global variable, which it does not clear."""
    (tmp_path / "stale.mlir").write_text(stale_function())
    save_summing_model(tmp_path / "right.onnx")
    (tmp_path / "spec.toml").write_text(STALE_SPEC)
    ended = hil("run", "stale.mlir", "--function", "step", "--generate", "spec.toml", *where, "--json")
    assert verdict_of(ended.case) == STALE, ended.case["reason"]


STALE_SPEC = """
reference = "right.onnx"
[[prompt]]
tokens = [1, 4, 2]
forced = [5, 0]
[roles]
tokens = "arg0"
positions = "arg1"
logits = "output0"
[roles.cache]
arg2 = "output1"
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "int4"])
def test_generation_of_variant_passes(
    generate: Callable[..., dict[str, Any]], make: ModuleType, dtype: str, tmp_path: Path
) -> None:
    onnx.save(make.Decoder(make.load_weights(), dtype).build(), tmp_path / "variant.onnx")
    case = generate(Path("variant.onnx"), "--runtime", "onnxruntime", *SIM)
    assert case["outcome"] == "PASS", case["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_free_generation_equals_numpy(
    hil: Callable[..., Ended], make: ModuleType, runtime: str, tmp_path: Path
) -> None:
    prompts, weights = read_prompts(), make.load_weights()
    rows = [f'[[prompt]]\nname = "{one["name"]}"\ntokens = {one["tokens"]}' for one in prompts]
    (tmp_path / "spec.toml").write_text("\n".join(["steps = 64", *rows]))
    ended = hil("run", DECODER / "decoder.onnx", "--generate", "spec.toml", "--runtime", runtime, *SIM, "--json")
    found = {case["generation"]["prompt"]: case["generation"]["tokens"] for case in ended.document["cases"]}
    assert found == {one["name"]: list(continue_prompt(weights, one["tokens"], 64)) for one in prompts}
    assert ended.code == 0 and len(found) == 8


def continue_prompt(weights: dict[str, np.ndarray], tokens: list[int], steps: int) -> Iterator[int]:
    """Yield the token after the prompt and after each step, in float64."""
    decoder = NumpyDecoder(weights)
    for _ in range(steps + 1):
        token = int(np.argmax(decoder.run(tokens)[-1]))
        yield token
        tokens = [token]
