"""LiteRT models with state: every run begins with the saved state, for any signature."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.models import DIGITS
from support.tflite_decoder import SLOTS, VOCABULARY, save_tflite_decoder

from hil.agent.runtimes import tflite
from hil.errors import LoadFailed
from hil.formats.litert import LiteRtSignature, open_signature

pytest.importorskip("ai_edge_litert")

SCALER = DIGITS.parent / "tflite" / "scaler.tflite"


@pytest.fixture
def assigning(tmp_path: Path) -> Path:
    """Return a model whose second signature, ``scale``, assigns a variable."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(SCALER.read_bytes(), 0)
    graph = model.subgraphs[1]
    handle = schema.TensorT()
    handle.name, handle.type, handle.shape = b"handle", schema.TensorType.RESOURCE, []
    graph.tensors.append(handle)
    place = len(graph.tensors) - 1

    def operator(name: str, options: str, inputs: list[int], outputs: list[int]) -> object:
        code, made = schema.OperatorCodeT(), schema.OperatorT()
        code.builtinCode = getattr(schema.BuiltinOperator, name)
        code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), 1
        model.operatorCodes.append(code)
        made.opcodeIndex, made.inputs, made.outputs = len(model.operatorCodes) - 1, inputs, outputs
        made.builtinOptionsType = getattr(schema.BuiltinOptions, options)
        made.builtinOptions = getattr(schema, f"{options}T")()
        return made

    making = operator("VAR_HANDLE", "VarHandleOptions", [], [place])
    making.builtinOptions.container, making.builtinOptions.sharedName = b"", b"kept"  # type: ignore[attr-defined]
    assign = operator("ASSIGN_VARIABLE", "AssignVariableOptions", [place, graph.outputs[0]], [])
    graph.operators = [making, *graph.operators, assign]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    file = tmp_path / "assigning.tflite"
    file.write_bytes(builder.Output())
    return file


def test_open_signature_detects_variable_in_any_signature(assigning: Path) -> None:
    assert open_signature(assigning, "scale").keeping == ("VARIABLE",)
    assert open_signature(assigning, "double").keeping == ()
    assert open_signature(SCALER, "scale").keeping == ()


@pytest.mark.parametrize(("function", "opened"), [("scale", 2), ("double", 1)])
def test_tflite_renew_reopens_only_stateful_signatures(
    assigning: Path, monkeypatch: pytest.MonkeyPatch, function: str, opened: int
) -> None:
    made: list[LiteRtSignature] = []

    def counted(*arguments: object, **options: object) -> LiteRtSignature:
        made.append(open_signature(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(tflite, "open_signature", counted)
    program = tflite.TfLiteRuntime({}).load(assigning.parent, assigning.name, "", function)
    program.bind([np.ones([4] * len(spec.shape), np.float32) for spec in program.inputs])
    for _ in range(2):
        program.renew()
        program.run()
    assert len(made) == opened
    assert all(np.isfinite(array).all() for array in program.fetch())


def test_tflite_step_takes_cache_of_other_function(tmp_path: Path) -> None:
    path = save_tflite_decoder(tmp_path / "m.tflite", [2])
    decode = tflite.TfLiteRuntime({}).load(tmp_path, path.name, "", "decode")

    def feeds(program: tflite.TfLiteProgram, tokens: list[int], at: int, cache: dict[str, np.ndarray]) -> list:
        count = len(tokens)
        given = {
            "tokens": np.array([tokens], np.int32),
            "input_pos": np.arange(at, at + count, dtype=np.int32),
            "mask": (np.arange(SLOTS) <= np.arange(at, at + count)[:, None])[None, None],
            **cache,
        }
        return [given[spec.name] for spec in program.inputs]

    def step(program: tflite.TfLiteProgram, tokens: list[int], at: int, cache: dict) -> dict[str, np.ndarray]:
        made = program.step(feeds(program, tokens, at, cache))
        return {
            spec.name: program.to_array(place, value)
            for place, (spec, value) in enumerate(zip(program.outputs, made, strict=True))
        }

    empty = {spec.name: np.zeros(spec.shape, np.float32) for spec in decode.inputs if "cache" in spec.name}
    prefill = decode.open_function("prefill_2")
    logits = []
    for calls in ([(prefill, [1, 4], 0)], [(decode, [1], 0), (decode, [4], 1)]):
        cache = empty
        for program, tokens, at in calls:
            cache = {name: one for name, one in step(program, tokens, at, cache).items() if name != "logits"}
        logits.append(step(decode, [2], 2, cache)["logits"])
    assert logits[0].shape == (1, 1, VOCABULARY) and logits[0].any()
    np.testing.assert_array_equal(logits[0], logits[1])
    decode.renew()
    np.testing.assert_array_equal(step(decode, [2], 2, cache)["logits"], logits[1])
    with pytest.raises(LoadFailed, match="function 'prefill_9' not found"):
        decode.open_function("prefill_9")
