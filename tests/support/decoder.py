"""The decoder of examples/decoder in NumPy, with the faults of make.py: the reference of tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

DECODER = Path(__file__).parents[2] / "examples" / "decoder"

HEAD_SIZE = 16
ROPE_THETA = 10000.0
NORM_EPSILON = 1e-6

Array = np.ndarray


def import_make() -> ModuleType:
    """Return the module of examples/decoder/make.py."""
    spec = importlib.util.spec_from_file_location("decoder_make", DECODER / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normalize(x: Array, scale: Array) -> Array:
    """RMSNorm of rows."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + NORM_EPSILON) * scale


def rotate(x: Array, positions: Array) -> Array:
    """RoPE of [heads, sequence, head size]."""
    half = HEAD_SIZE // 2
    angles = positions[:, None] * ROPE_THETA ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


def softmax(x: Array) -> Array:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


class NumpyDecoder:
    """A float64 decoder with a growing cache.

    Attributes:
        keys, values: the cache of each layer, [KV heads, entries, head size]
        hidden: the output of each layer for the last chunk, [sequence, hidden]
    """

    def __init__(self, weights: Mapping[str, Array], fault: str | None = None) -> None:
        self.weights = {name: value.astype(np.float64) for name, value in weights.items()}
        self.fault = fault
        self.layers = sum(name.endswith(".query") for name in weights)
        kv_heads = weights["layers.0.key"].shape[1] // HEAD_SIZE
        self.keys = [np.zeros((kv_heads, 0, HEAD_SIZE)) for _ in range(self.layers)]
        self.values = [np.zeros((kv_heads, 0, HEAD_SIZE)) for _ in range(self.layers)]
        self.hidden: list[Array] = []

    def run(self, ids: Sequence[int]) -> Array:
        """Extend the cache with tokens. Return their logits, [sequence, vocabulary]."""
        length = self.keys[0].shape[1]
        positions = np.arange(length, length + len(ids))
        self.hidden = []
        x = self.weights["embedding"][np.asarray(ids)]
        for n in range(self.layers):
            x = x + self._attend(n, normalize(x, self._weight(n, "attention_norm")), positions)
            x = x + self._feed_forward(n, normalize(x, self._weight(n, "ffn_norm")), positions)
            if self.fault == "layer" and n == 2 and self._decodes_from(50, positions):
                x[:, 5] *= -1
            self.hidden.append(x)
        logits = normalize(x, self.weights["norm"]) @ self.weights["head"]
        if self.fault == "column":
            logits[:, [ord("e"), ord("f")]] = logits[:, [ord("f"), ord("e")]]
        return logits

    def _weight(self, n: int, name: str) -> Array:
        return self.weights[f"layers.{n}.{name}"]

    @staticmethod
    def _decodes_from(first: int, positions: Array) -> bool:
        return len(positions) == 1 and bool(positions[0] >= first)

    def _attend(self, n: int, x: Array, positions: Array) -> Array:
        query, key, value = (
            (x @ self._weight(n, name)).reshape(len(x), -1, HEAD_SIZE).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        turns = positions - (positions >= 48) if self.fault == "rope" else positions
        query, key = rotate(query, turns), rotate(key, turns)
        self.keys[n], self.values[n] = (
            self._extend(past, new, positions) for past, new in ((self.keys[n], key), (self.values[n], value))
        )
        group = len(query) // len(key)
        keys, values = self.keys[n].repeat(group, 0), self.values[n].repeat(group, 0)
        scores = query @ keys.swapaxes(1, 2) / np.sqrt(HEAD_SIZE)
        last = {"mask_next": positions + 1, "mask_newest": np.maximum(positions - 1, 0)}.get(
            self.fault or "", positions
        )
        scores[:, np.arange(keys.shape[1]) > last[:, None]] = -np.inf
        mixed = softmax(scores) @ values
        return mixed.swapaxes(0, 1).reshape(len(x), -1) @ self._weight(n, "output")

    def _extend(self, past: Array, new: Array, positions: Array) -> Array:
        if self._decodes_from(40, positions):
            if self.fault == "slot":
                return np.concatenate([past[:, :-1], new, np.zeros_like(new)], 1)
            if self.fault == "swap":
                return np.concatenate([past[:, :-1], new, past[:, -1:]], 1)
        return np.concatenate([past, new], 1)

    def _feed_forward(self, n: int, x: Array, positions: Array) -> Array:
        gate = x @ self._weight(n, "gate")
        product = gate / (1 + np.exp(-gate)) * (x @ self._weight(n, "up"))
        if self.fault == "overflow" and n == 2:
            with np.errstate(over="ignore"):
                broken = (product * 2.0**20).astype(np.float16).astype(np.float64) / 2.0**20
            product = np.where(positions[:, None] >= 56, broken, product)
        return product @ self._weight(n, "down")
