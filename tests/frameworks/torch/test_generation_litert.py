"""`hil run --generate` on a model that litert-torch exports, compared with the same weights in ONNX."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("litert_torch")
pytest.importorskip("tensorflow")

DECODER = Path(__file__).parents[3] / "examples" / "decoder"
SPEC = """
steps = 8
reference = "decoder.onnx"
[[prompt]]
tokens = [84, 104, 101, 32, 98, 111, 97, 114, 100, 32, 110, 101, 101, 100, 115, 32, 83, 83]
forced = [72, 44, 32, 97, 32, 80, 79, 83]
"""
# Names of the example's weights in transformers.
_LAYER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def save_model(folder: Path) -> None:
    """Write the example's decoder for transformers, with a tokenizer of bytes, and as an ONNX model."""
    from tokenizers import Tokenizer, models

    example = runpy.run_path(str(DECODER / "make.py"))
    weights = example["load_weights"]()
    onnx.save(example["Decoder"](weights).build(), folder / "decoder.onnx")
    names = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    layers = sum(name.endswith(".query") for name in weights)
    names |= {f"layers.{n}.{own}": f"model.layers.{n}.{one}" for n in range(layers) for own, one in _LAYER.items()}
    values = {
        f"{names[own]}.weight": torch.from_numpy(
            np.ascontiguousarray(array.T if array.ndim == 2 and own != "embedding" else array, np.float32)
        )
        for own, array in weights.items()
    }
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=weights["layers.0.gate"].shape[1],
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
    )
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(values)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_generation_of_litert_torch_export(hil, tmp_path: Path):
    save_model(tmp_path)
    arguments = ["--cache_length=128", "--prefill_lengths=[16,4]", "--bundle_litert_lm=False"]
    module = "litert_torch.generative.export_hf"
    subprocess.run([sys.executable, "-m", module, str(tmp_path), str(tmp_path / "out"), *arguments], check=True)
    (model,) = (tmp_path / "out").rglob("model.tflite")
    (tmp_path / "spec.toml").write_text(SPEC)
    command = ("run", model, "--generate", tmp_path / "spec.toml", "--runtime-hw-type", "sim", "--json")
    case = hil(*command).case
    assert case["outcome"] == "PASS", case["reason"]
    case = hil(*command, "--fault", "wrong_layer:position=20").case
    assert case["reason"].startswith("layer 2, step 3, position 20, kv_cache_v_3: at position 20 KL"), case["reason"]
