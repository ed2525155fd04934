"""Roles of a decoder's inputs and outputs, from the names and shapes of all exporters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hil.controller.models.generation import functions
from hil.controller.models.generation.functions import add_prompt_functions
from hil.controller.models.generation.roles import Decoder, detect_roles, match_prompt_function
from hil.controller.models.generation.spec import GenerateSpec, Prompt, Roles
from hil.core.results import Model
from hil.core.steps import PromptFunction, StepRule
from hil.core.tensors import TensorSpec
from hil.errors import UsageError

IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"))
LOGITS = TensorSpec("logits", "float32", ("batch", "sequence", 128))


def spec(**more: Any) -> GenerateSpec:
    return GenerateSpec(prompt=[Prompt(tokens=[1])], **more)


def tensors(names: list[str], shape: tuple[Any, ...], dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(name, dtype, shape) for name in names]


def past(names: list[str]) -> list[TensorSpec]:
    return tensors(names, ("batch", 2, "past", 16))


def total(names: list[str]) -> list[TensorSpec]:
    return tensors(names, ("batch", 2, "total", 16))


def detect(inputs: list[TensorSpec], outputs: list[TensorSpec], **roles: Any) -> Decoder:
    return detect_roles(inputs, outputs, spec(roles=Roles(**roles)))


def rules_of(decoder: Decoder, inputs: list[TensorSpec]) -> dict[str, StepRule]:
    return {inputs[place].name: rule for place, rule in decoder.plan.rules}


def layers_of(decoder: Decoder) -> list[tuple[str, int, bool]]:
    return [(one.output, one.layer, one.is_key) for one in decoder.cache]


def test_detect_roles_of_optimum_export():
    inputs = [
        IDS,
        TensorSpec("attention_mask", "int64", ("batch", "total")),
        TensorSpec("position_ids", "int64", ("batch", "sequence")),
        *past([f"past_key_values.{n}.{part}" for n in range(11) for part in ("key", "value")]),
    ]
    outputs = [LOGITS, *total([f"present.{n}.{part}" for n in range(11) for part in ("key", "value")])]
    decoder = detect(inputs, outputs)
    assert rules_of(decoder, inputs) == {
        "input_ids": StepRule.TOKENS,
        "attention_mask": StepRule.MASK,
        "position_ids": StepRule.POSITIONS,
    }
    assert decoder.plan.feedback == tuple((3 + n, 1 + n) for n in range(22))
    assert (decoder.plan.logits, decoder.plan.bound, decoder.inputs) == (0, 0, ())
    assert layers_of(decoder)[:3] == [
        ("present.0.key", 0, True),
        ("present.0.value", 0, False),
        ("present.1.key", 1, True),
    ]
    assert layers_of(decoder)[-1] == ("present.10.value", 10, False)
    assert {one.axis for one in decoder.cache} == {2}


def test_detect_roles_of_genai_export():
    inputs = [
        IDS,
        TensorSpec("seqlens_k", "int32", ("batch", 1)),
        TensorSpec("total_sequence_length", "int32", ()),
        *past(["past_key_values.0.key", "past_key_values.0.value"]),
    ]
    decoder = detect(inputs, [LOGITS, *total(["present.0.key", "present.0.value"])])
    assert rules_of(decoder, inputs) == {
        "input_ids": StepRule.TOKENS,
        "seqlens_k": StepRule.LAST,
        "total_sequence_length": StepRule.LENGTH,
    }


@pytest.mark.parametrize(
    ("taken", "made"),
    [
        ("past_{n}_{part}", "present_{n}_{part}"),
        ("past.{n}.{part}", "present.{n}.{part}"),
        ("past_key_values_{n}_{part}", "present_key_values_{n}_{part}"),
        ("past_key_values_{part}_cache_{n}", "present_key_values_{part}_cache_{n}"),
        ("past_key_values.{n}.{part}", "new_key_values.{n}.{part}"),
        ("cache_in.{n}.{part}", "cache_out.{n}.{part}"),
        ("{part}_cache_{n}_in", "{part}_cache_{n}_out"),
        ("{part}_cache.{n}", "{part}_cache.{n}_out"),
        ("in_{part}_{n}", "out_{part}_{n}"),
    ],
)
def test_detect_roles_of_torch_exports(taken: str, made: str):
    parts = [(n, part) for n in range(3) for part in ("key", "value")]
    inputs = [IDS, *past([taken.format(n=n, part=part) for n, part in parts])]
    decoder = detect(inputs, [*total([made.format(n=n, part=part) for n, part in parts]), LOGITS])
    assert layers_of(decoder) == [(made.format(n=n, part=part), n, part == "key") for n, part in parts]
    assert decoder.plan.logits == 6


@pytest.mark.parametrize("names", [["past_0", "past_1", "past_2", "past_3"], ["past.3", "past.4", "past.5", "past.6"]])
def test_detect_roles_pairs_numbered_tensors_to_layers(names: list[str]):
    """torch.onnx numbers the tensors of a list, and not the layers."""
    made = [name.replace("past", "present") for name in names]
    decoder = detect([IDS, *past(names)], [LOGITS, *total(made)])
    assert layers_of(decoder) == [(made[0], 0, True), (made[1], 0, False), (made[2], 1, True), (made[3], 1, False)]


def test_detect_roles_pairs_tensors_without_numbers_to_layers():
    decoder = detect(
        [IDS, *past(["a_key", "a_value", "b_key", "b_value"])],
        [LOGITS, *total(["a_key", "a_value", "b_key", "b_value"])],
    )
    assert layers_of(decoder) == [("a_key", 0, True), ("a_value", 0, False), ("b_key", 1, True), ("b_value", 1, False)]


@pytest.mark.parametrize("prefix", ["", "decode_", "serving_default_"])
@pytest.mark.parametrize("suffix", ["", ":0"])
def test_detect_roles_of_litert_export(prefix: str, suffix: str):
    def named(name: str) -> str:
        return f"{prefix}{name}{suffix}"

    keys, values = (1, 128, 2, 16), (1, 2, 16, 128)
    caches = [f"kv_cache_{part}_{n}" for n in range(2) for part in "kv"]
    inputs = [
        TensorSpec(named("tokens"), "int32", (1, 1)),
        TensorSpec(named("input_pos"), "int32", (1,)),
        TensorSpec(named("mask"), "bool", (1, 1, 1, 128)),
        *(TensorSpec(named(name), "float32", keys if "_k_" in name else values) for name in caches),
    ]
    outputs = [LOGITS, *(TensorSpec(named(one), "float32", keys if "_k_" in one else values) for one in caches)]
    decoder = detect(inputs, outputs)
    assert list(rules_of(decoder, inputs).values()) == [StepRule.TOKENS, StepRule.POSITIONS, StepRule.MASK]
    assert [(layer, is_key) for _, layer, is_key in layers_of(decoder)] == [
        (0, True),
        (0, False),
        (1, True),
        (1, False),
    ]
    assert [one.axis for one in decoder.cache] == [1, 3, 1, 3]
    assert decoder.plan.bound == 128


def test_detect_roles_of_executorch_export():
    inputs = [TensorSpec("tokens", "int64", (1, None)), TensorSpec("input_pos", "int64", (1,))]
    decoder = detect(inputs, [TensorSpec("output_0", "float32", (1, 128))])
    assert list(rules_of(decoder, inputs).values()) == [StepRule.TOKENS, StepRule.POSITIONS]
    assert decoder.cache == () and decoder.plan.feedback == ()


def test_detect_roles_of_executorch_program_without_names():
    inputs = [TensorSpec("input0", "int64", ("a", "b")), TensorSpec("input1", "int64", (1,))]
    outputs = [TensorSpec("output0", "float32", (1, 128))]
    assert rules_of(detect(inputs, outputs), inputs) == {"input0": StepRule.TOKENS, "input1": StepRule.POSITIONS}


@pytest.mark.parametrize("has_mask", [True, False])
def test_detect_roles_of_static_cache(has_mask: bool):
    names = [f"past_key_values.0.{part}" for part in ("key", "value")]
    inputs = [
        TensorSpec("input_ids", "int64", (1, 1)),
        TensorSpec("cache_position", "int64", (1,)),
        *tensors(names, (1, 2, 64, 16), "float16"),
    ]
    if has_mask:
        inputs.append(TensorSpec("attention_mask", "float16", (1, 1, 1, 64)))
    outputs = [LOGITS, *tensors(["present.0.key", "present.0.value"], (1, 2, 64, 16), "float16")]
    decoder = detect(inputs, outputs)
    assert decoder.plan.bound == 64 and [one.axis for one in decoder.cache] == [2, 2]


def test_detect_roles_takes_bound_of_fixed_cache_from_specification():
    """A cache of [1, positions, heads, size] without a mask looks like one with positions second from the end."""
    inputs = [IDS, *tensors(["past.0.key", "past.0.value"], (1, 64, 2, 16))]
    outputs = [LOGITS, *tensors(["present.0.key", "present.0.value"], (1, 64, 2, 16))]
    decoder = detect(inputs, outputs, bound=64)
    assert decoder.plan.bound == 64 and [one.axis for one in decoder.cache] == [1, 1]
    with pytest.raises(UsageError, match="no cache input has 65 positions"):
        detect(inputs, outputs, bound=65)


def test_detect_roles_takes_bound_of_cache_inside_program():
    assert detect([IDS], [LOGITS], bound=64).plan.bound == 64


HYBRID = ["past_conv.0", "past_key_values.1.key", "past_key_values.1.value", "past_key_values.2.recurrent_state"]


def hybrid(names: list[str], size: Any) -> list[TensorSpec]:
    """A model with convolutions, attention and linear attention, as optimum and genai name their tensors."""
    shapes = [("batch", 64, 3), ("batch", 2, size, 16), ("batch", 2, size, 16), ("batch", 2, 16, 16)]
    return [TensorSpec(name, "float32", shape) for name, shape in zip(names, shapes, strict=True)]


@pytest.mark.parametrize(("size", "bound"), [("past", 0), (48, 48)])
def test_detect_roles_finds_states_without_positions(size: Any, bound: int):
    made = [name.replace("past_key_values", "present").replace("past", "present") for name in HYBRID]
    decoder = detect([IDS, *hybrid(HYBRID, size)], [LOGITS, *hybrid(made, size)])
    assert [one.axis for one in decoder.cache] == [None, 2, 2, None]
    assert [one.layer for one in decoder.cache] == [0, 1, 1, 2]
    assert decoder.plan.bound == bound
    assert decoder.plan.shapes == ((1, 64, 3), (1, 2, bound, 16), (1, 2, bound, 16), (1, 2, 16, 16))


def test_detect_roles_of_fixed_size_beside_growing_cache_is_state():
    names = ["past_0", "past_1", "past_2"]
    inputs = [*tensors(names[:1], (1, 8, 4)), *past(names[1:])]
    outputs = [TensorSpec(one.name.replace("past", "present"), "float32", one.shape) for one in inputs]
    decoder = detect([IDS, *inputs], [LOGITS, *outputs])
    assert [one.axis for one in decoder.cache] == [None, 2, 2] and decoder.plan.bound == 0


def test_detect_roles_uses_only_integer_input_as_tokens():
    inputs = [TensorSpec("arg0", "int64", (1, "n")), *past(["arg1", "arg2"])]
    outputs = [TensorSpec("result0", "float32", (1, "n", 9)), *total(["result1", "result2"])]
    decoder = detect(inputs, outputs, cache={"arg1": "result1", "arg2": "result2"})
    assert rules_of(decoder, inputs) == {"arg0": StepRule.TOKENS}
    assert decoder.plan.feedback == ((1, 1), (2, 2)) and decoder.plan.logits == 0


def test_detect_roles_prefers_names_of_specification():
    inputs = [
        TensorSpec("input_ids", "int64", (1, "n")),
        TensorSpec("a", "int64", (1, "n")),
        TensorSpec("b", "int64", (1, "n")),
        TensorSpec("c", "int32", ()),
        TensorSpec("d", "int32", ()),
        TensorSpec("e", "float32", (1, 1, "n", "m")),
    ]
    outputs = [LOGITS, TensorSpec("scores", "float32", (1, "n", 9))]
    decoder = detect(inputs, outputs, tokens="a", positions="b", length="c", last="d", mask="e", logits="scores")
    assert rules_of(decoder, inputs) == {
        "a": StepRule.TOKENS,
        "b": StepRule.POSITIONS,
        "c": StepRule.LENGTH,
        "d": StepRule.LAST,
        "e": StepRule.MASK,
    }
    assert decoder.plan.logits == 1 and decoder.inputs == ("input_ids",)


def test_detect_roles_keeps_other_inputs_constant():
    inputs = [IDS, TensorSpec("temperature", "float32", ()), TensorSpec("image", "float32", (1, 3, 8, 8))]
    assert detect(inputs, [LOGITS]).inputs == ("temperature", "image")


def test_detect_roles_takes_numbers_of_specification():
    decoder = detect_roles([IDS], [LOGITS], spec(steps=5, chunk=3, stop=[0, 2]))
    plan = decoder.plan
    assert (plan.steps, plan.chunk, plan.stop, plan.bound) == (5, 3, (0, 2), 0)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (("float32", (1, 2, 64, 16)), ("float32", (1, 2, 65, 16))),
        (("float32", (1, 2, 64, 16)), ("float16", (1, 2, 64, 16))),
        (("float32", (1, 2, 64, 16)), ("float32", (2, 64, 16))),
        (("float32", (1, "past", 16)), ("float32", (1, "total", 8))),
    ],
)
def test_detect_roles_names_both_shapes_of_mismatched_cache(own: tuple[Any, Any], other: tuple[Any, Any]):
    taken, made = TensorSpec("past.0.key", *own), TensorSpec("present.0.key", *other)
    with pytest.raises(UsageError) as caught:
        detect([IDS, taken], [LOGITS, made])
    assert caught.value.message == f"output {made} does not fit input {taken}"
    assert "[roles.cache]" in caught.value.hint


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([TensorSpec("x", "float32", (1, 3))], [LOGITS], "cannot find an input with token ids among x: 1x3 float32"),
        (
            [TensorSpec("a", "int64", (1, "n")), TensorSpec("b", "int64", (1, "n"))],
            [LOGITS],
            "cannot find an input with token ids among a: 1xn int64, b: 1xn int64",
        ),
        (
            [IDS],
            [TensorSpec("a", "float32", (1, 3)), TensorSpec("b", "float32", (1, 3))],
            "cannot find an output with logits among a: 1x3 float32, b: 1x3 float32",
        ),
    ],
)
def test_detect_roles_lists_names_when_role_is_missing(
    inputs: list[TensorSpec], outputs: list[TensorSpec], message: str
):
    with pytest.raises(UsageError) as caught:
        detect(inputs, outputs)
    assert caught.value.message == message and "[roles]" in caught.value.hint


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"tokens": "input_idz"}, "no input 'input_idz'"),
        ({"logits": "logit"}, "no output 'logit'"),
        ({"cache": {"a": "logits"}}, "no input 'a'"),
        ({"cache": {"input_ids": "b"}}, "no output 'b'"),
    ],
)
def test_detect_roles_suggests_names(roles: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message) as caught:
        detect([IDS], [LOGITS], **roles)
    assert ("input_ids" if "input" in message else "logits") in caught.value.hint


def function(name: str, count: int, cache: tuple[int, ...] = (1, 8, 4), **changed: TensorSpec | None) -> Model:
    """Return a function of a LiteRT model. A change replaces a tensor, or drops it with None."""
    inputs = {
        "kv_cache_k_0": TensorSpec(f"{name}_kv_cache_k_0:0", "float32", cache),
        "tokens": TensorSpec(f"{name}_tokens:0", "int32", (1, count)),
        "input_pos": TensorSpec(f"{name}_input_pos:0", "int32", (count,)),
        **{key: spec for key, spec in changed.items() if not key.startswith("out")},
    }
    outputs = {
        "out_logits": TensorSpec("logits", "float32", (1, count, 9)),
        "out_cache": TensorSpec(f"{name}_kv_cache_k_0:0", "float32", cache),
        **{key: spec for key, spec in changed.items() if key.startswith("out")},
    }
    given, made = (tuple(spec for spec in side.values() if spec) for side in (inputs, outputs))
    return Model("m", "tflite", Path("m"), {}, "", function=name, inputs=given, outputs=made)


DECODE = function("decode", 1)


def match(other: Model) -> PromptFunction:
    return match_prompt_function(detect(list(DECODE.inputs or ()), list(DECODE.outputs or ())), DECODE, other)


def test_match_prompt_function_pairs_tensors_by_name():
    assert match(function("prefill_4", 4)) == PromptFunction("prefill_4", (0, 1, 2), (0, 1))
    reduced = match(function("prefill_4", 4, input_pos=None, out_logits=None))
    assert reduced == PromptFunction("prefill_4", (0, 1, -1), (-1, 0))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            function("prefill", 4, image=TensorSpec("image", "float32", (3,))),
            "function 'prefill' has an input image: 3 float32, which 'decode' lacks: decode_kv_cache_k_0:0: 1x8x4",
        ),
        (function("prefill", 4, tokens=None), "function 'prefill' lacks decode_tokens:0: 1x1 int32: prefill_kv_cache"),
        (function("prefill", 4, kv_cache_k_0=None), "function 'prefill' lacks decode_kv_cache_k_0:0: 1x8x4 float32"),
        (
            function("prefill", 4, out_cache=None),
            "function 'prefill' lacks decode_kv_cache_k_0:0: 1x8x4 float32: logits: 1x4x9",
        ),
        (
            function("prefill", 4, (1, 16, 4)),
            "output prefill_kv_cache_k_0:0: 1x16x4 float32 does not fit input decode_kv_cache_k_0:0: 1x8x4 float32",
        ),
        (
            function("prefill", 4, kv_cache_k_0=TensorSpec("kv_cache_k_0", "float16", (1, 8, 4))),
            "output decode_kv_cache_k_0:0: 1x8x4 float32 does not fit input kv_cache_k_0: 1x8x4 float16",
        ),
    ],
)
def test_match_prompt_function_rejects_misfit(other: Model, message: str):
    with pytest.raises(UsageError) as caught:
        match(other)
    assert caught.value.message.startswith(message)


def test_add_prompt_functions_skips_misfit(monkeypatch: pytest.MonkeyPatch):
    found = {"prefill_4": function("prefill_4", 4), "prefill_8": function("prefill_8", 8, (1, 16, 4))}
    monkeypatch.setattr(functions, "import_model", lambda path, *, function, dims: found[function])
    model = replace(DECODE, producer={"functions": ["decode", "prefill_8", "prefill_4", "other"]})
    decoder = detect(list(DECODE.inputs or ()), list(DECODE.outputs or ()))
    assert [one.name for one in add_prompt_functions(decoder, model).plan.prompts] == ["prefill_4"]
