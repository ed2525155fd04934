"""The committed decoder example: its files, and the variants of make.py compared with NumPy in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from support.commands import Ended
from support.decoder import DECODER, NumpyDecoder, import_make

from hil.agent.runtimes.iree import IreeRuntime
from hil.core.config_files import parse_toml

LAYERS = 4
PROMPT = 16
# Positions up to 69, so that all faults are active.
FORCED = 54

Array = np.ndarray
# Takes the inputs in the model's order. Returns the outputs.
Program = Callable[[list[Array]], Sequence[Array]]


@pytest.fixture(scope="module")
def make() -> ModuleType:
    return import_make()


@pytest.fixture(scope="module")
def weights(make: ModuleType) -> dict[str, Array]:
    return make.load_weights()


@pytest.fixture(scope="module")
def prompts() -> dict[str, dict[str, Any]]:
    path = DECODER / "generate.toml"
    document = parse_toml(path.read_text(), path)
    assert document["steps"] == 64
    return {prompt["name"]: prompt for prompt in document["prompt"]}


@pytest.fixture(scope="module")
def tokens(prompts: dict[str, dict[str, Any]]) -> list[int]:
    return [*prompts["board"]["tokens"], *prompts["board"]["forced"][:FORCED]]


@pytest.fixture(scope="module")
def want(weights: dict[str, Array], tokens: list[int]) -> Array:
    return decode(NumpyDecoder(weights).run, tokens)


class CachedModel:
    """A model with the cache that its last call returned."""

    def __init__(self, program: Program, dtype: type[np.floating] = np.float32, is_static: bool = False) -> None:
        self.program, self.is_static, self.length = program, is_static, 0
        self.cache = [np.zeros((1, 2, 128 if is_static else 0, 16), dtype) for _ in range(2 * LAYERS)]

    def run(self, ids: Sequence[int]) -> Array:
        positions = np.arange(self.length, self.length + len(ids))
        self.length += len(ids)
        mask = np.ones((1, self.length), np.int64)
        if self.is_static:
            mask = (np.arange(128) <= positions[:, None])[None, None]
        logits, *self.cache = self.program([np.array([ids]), mask, positions[None], *self.cache])
        return logits[0].astype(np.float64)


def decode(run: Callable[[list[int]], Array], tokens: list[int]) -> Array:
    """Run the prompt, then one token after the other. Return the logits of all tokens."""
    return np.concatenate([run(tokens[:PROMPT]), *(run([token]) for token in tokens[PROMPT:])])


def open_session(model: onnx.ModelProto) -> Program:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # Otherwise ONNX Runtime replaces DequantizeLinear and MatMul by a product that rounds its input to int8.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def relative_error(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def first_difference(got: Array, want: Array) -> int | None:
    """Return the first row with a difference of more than 1e-3, or NaN."""
    rows = np.flatnonzero(~(np.abs(got - want) < 1e-3).all(-1))
    return int(rows[0]) if len(rows) else None


def dequantized(make: ModuleType, weights: dict[str, Array], dtype: str) -> dict[str, Array]:
    """The weights that a variant represents. float16 represents the stored weights exactly."""
    matrices = {name: value for name, value in weights.items() if value.ndim == 2 and name != "embedding"}
    if dtype == "int8":
        pairs = {name: make.quantize_int8(value) for name, value in matrices.items()}
        return {**weights, **{name: pair.values * pair.scales for name, pair in pairs.items()}}
    if dtype == "int4":
        pairs = {name: make.quantize_int4(value) for name, value in matrices.items()}
        scales = {name: pair.scales.repeat(32, 0)[: len(pair.values)] for name, pair in pairs.items()}
        return {**weights, **{name: pair.values * scales[name] for name, pair in pairs.items()}}
    return weights


def test_decoder_files_are_small_and_consistent(make: ModuleType, weights: dict[str, Array]) -> None:
    assert sum(value.size for value in weights.values()) == 201280
    assert make.Decoder(weights).build().SerializeToString() == (DECODER / "decoder.onnx").read_bytes()
    assert (DECODER / "decoder.onnx").stat().st_size < 900_000
    assert (DECODER / "weights.npz").stat().st_size < 450_000


def test_decoder_prompts_are_ascii_text(prompts: dict[str, dict[str, Any]]) -> None:
    assert len(prompts) == 8
    assert {len(prompt["tokens"]) for prompt in prompts.values()} == {16}
    forced = [prompt["forced"] for prompt in prompts.values() if "forced" in prompt]
    assert [len(tokens) for tokens in forced] == [64, 64, 64]
    assert (
        bytes(prompts["board"]["tokens"] + prompts["board"]["forced"]).decode("ascii").startswith("The board needs SSH")
    )


def test_decoder_predicts_text_better_than_chance(want: Array, tokens: list[int]) -> None:
    logits = want[:-1] - want[:-1].max(1, keepdims=True)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert -np.log(shares[range(len(shares)), tokens[1:]]).mean() < 2.5  # uniform: 4.85


@pytest.mark.parametrize(
    ("dtype", "is_static", "is_qdq", "bound"),
    [
        ("fp32", False, False, 1e-5),
        ("fp32", True, False, 1e-5),
        ("fp16", False, False, 3e-3),
        ("fp16", True, False, 3e-3),
        ("int8", False, False, 1e-5),
        ("int8", True, False, 1e-5),
        ("int4", False, False, 1e-5),
        ("int4", True, False, 1e-5),
        ("int4", False, True, 1e-5),
    ],
)
def test_decoder_variants_match_numpy(
    dtype: str,
    is_static: bool,
    is_qdq: bool,
    bound: float,
    make: ModuleType,
    weights: dict[str, Array],
    tokens: list[int],
) -> None:
    numpy_decoder = NumpyDecoder(dequantized(make, weights, dtype))
    model = make.Decoder(weights, dtype, is_static, is_qdq=is_qdq).build()
    cached = CachedModel(open_session(model), np.float16 if dtype == "fp16" else np.float32, is_static)
    tokens = tokens[: PROMPT + 24]
    assert relative_error(decode(cached.run, tokens), decode(numpy_decoder.run, tokens)) < bound
    for n in range(LAYERS):
        for got, want in zip(cached.cache[2 * n :], (numpy_decoder.keys[n], numpy_decoder.values[n]), strict=False):
            assert relative_error(got[0, :, : len(tokens)].astype(np.float64), want) < bound


@pytest.mark.parametrize(("dtype", "low", "high"), [("int8", 1e-4, 0.05), ("int4", 0.01, 0.4)])
def test_decoder_quantization_error_has_expected_size(
    dtype: str, low: float, high: float, make: ModuleType, weights: dict[str, Array], tokens: list[int], want: Array
) -> None:
    got = decode(NumpyDecoder(dequantized(make, weights, dtype)).run, tokens)
    assert low < relative_error(got, want) < high


# The first position with other logits when tokens are decoded one by one, and in a single prefill. The first layer and
# position with another cache entry.
FAULTS: dict[str, tuple[int | None, int | None, tuple[int, int] | None]] = {
    "slot": (40, None, (0, 39)),
    "swap": (None, None, (0, 39)),
    "mask_next": (0, 0, (1, 0)),
    "mask_newest": (1, 1, (1, 1)),
    "rope": (48, 48, (0, 48)),
    # In a prefill, a share of 0 times NaN is NaN in the rows before position 56, too.
    "overflow": (56, 0, (3, 56)),
    "layer": (50, None, (3, 50)),
    "column": (0, 0, None),
}


def test_decoder_fault_table_is_complete(make: ModuleType) -> None:
    assert FAULTS.keys() == make.FAULTS.keys()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_decoder_faults_appear_where_expected(
    fault: str, make: ModuleType, weights: dict[str, Array], tokens: list[int], want: Array
) -> None:
    program = open_session(make.Decoder(weights, fault=fault).build())
    cached, faulty = CachedModel(program), NumpyDecoder(weights, fault)
    got = decode(cached.run, tokens)
    np.testing.assert_allclose(got, decode(faulty.run, tokens), rtol=0, atol=1e-3)
    decoded, prefilled, entry = FAULTS[fault]
    assert first_difference(got, want) == decoded
    assert first_difference(CachedModel(program).run(tokens), want) == prefilled
    intact = NumpyDecoder(weights)
    decode(intact.run, tokens)
    found = (
        (
            n,
            first_difference(
                np.moveaxis(part[0], 1, 0).reshape(len(tokens), -1), np.moveaxis(true, 1, 0).reshape(len(tokens), -1)
            ),
        )
        for n in range(LAYERS)
        for part, true in zip(cached.cache[2 * n : 2 * n + 2], (intact.keys[n], intact.values[n]), strict=True)
    )
    assert min(((n, at) for n, at in found if at is not None), default=None) == entry


def test_make_writes_file_of_command_line(make: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make.py", str(tmp_path / "out.onnx"), "--dtype", "int4", "--qdq"])
    make.main()
    model = onnx.load(tmp_path / "out.onnx")
    assert {tensor.data_type for tensor in model.graph.initializer} >= {onnx.TensorProto.INT4}
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 21}


@pytest.mark.parametrize(
    "arguments", [["--qdq"], ["--static", "--fault", "slot"]], ids=["qdq without int4", "static with fault"]
)
def test_make_rejects_option_conflicts(
    make: ModuleType, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make.py", str(tmp_path / "out.onnx"), *arguments])
    with pytest.raises(SystemExit):
        make.main()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def iree() -> Iterator[IreeRuntime]:
    """A runtime that outlives its programs, because their buffers need its device."""
    yield IreeRuntime({})


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [False, True], ids=["growing cache", "static cache"])
def test_decoder_runs_on_iree_with_all_lengths(
    is_static: bool,
    iree: IreeRuntime,
    make: ModuleType,
    weights: dict[str, Array],
    tokens: list[int],
    want: Array,
    hil: Callable[..., Ended],
    tmp_path: Path,
) -> None:
    onnx.save(make.Decoder(weights, is_static=is_static).build(), tmp_path / "decoder.onnx")
    assert hil("compile", "decoder.onnx", "-o", "program/decoder.vmfb").code == 0
    program = iree.load(tmp_path / "program", "decoder.vmfb", "", "")

    def call(inputs: list[Array]) -> list[Array]:
        program.bind(inputs)
        program.run()
        return [np.array(output) for output in program.fetch()]

    cached = CachedModel(call, is_static=is_static)
    for length in (16, 1, 2, 1, 16, 1):
        begin = cached.length
        got = cached.run(tokens[begin : begin + length])
        assert relative_error(got, want[begin : begin + length]) < 1e-5
