"""The committed digits example: contents of its files, accuracy of its models, and training."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
MODELS = ["digits_cnn.onnx", "digits_cnn_int8.onnx", "digits_cnn_batch.onnx"]


@pytest.fixture(scope="module")
def train() -> ModuleType:
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("digits_train", DIGITS / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def test_images() -> tuple[np.ndarray, np.ndarray]:
    with np.load(DIGITS / "digits_test.npz") as held_out:
        return held_out["image"], held_out["label"]


def logits(name: str, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(DIGITS / name, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(["logits"], {"image": image[None]})[0] for image in images])


def accuracy(name: str, images: np.ndarray, labels: np.ndarray) -> float:
    return float((logits(name, images).argmax(1) == labels).mean())


def test_digits_test_images_cover_all_digits(test_images: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = test_images
    assert images.shape == (64, 1, 8, 8)
    assert images.dtype == np.float32
    assert images.min() == 0
    assert images.max() == 1
    assert labels.dtype == np.int64
    assert set(labels.tolist()) == set(range(10))


@pytest.mark.parametrize("name", MODELS)
def test_digits_models_classify_test_images(name: str, test_images: tuple[np.ndarray, np.ndarray]) -> None:
    assert accuracy(name, *test_images) >= 0.95


def test_digits_test_images_differ_from_training_images(
    train: ModuleType, test_images: tuple[np.ndarray, np.ndarray]
) -> None:
    images, labels = test_images
    trained, _, held_out, held_out_labels = train.load()
    np.testing.assert_array_equal(images, held_out[:64])
    np.testing.assert_array_equal(labels, held_out_labels[:64])
    assert not {image.tobytes() for image in trained} & {image.tobytes() for image in held_out}


@pytest.mark.parametrize("name", ["digits_cnn.onnx", "digits_cnn_int8.onnx"])
def test_digits_models_classify_all_held_out_images(name: str, train: ModuleType) -> None:
    _, _, images, labels = train.load()
    assert len(labels) == 360
    assert accuracy(name, images, labels) > 0.95


def test_digits_int8_model_uses_int8_and_matches_float32(test_images: tuple[np.ndarray, np.ndarray]) -> None:
    images, _ = test_images
    model = onnx.load(DIGITS / "digits_cnn_int8.onnx")
    weights = {t.name: t.data_type for t in model.graph.initializer if t.name.endswith("weight_quantized")}
    assert len(weights) == 3
    assert set(weights.values()) == {onnx.TensorProto.INT8}
    exact, quantized = logits("digits_cnn.onnx", images), logits("digits_cnn_int8.onnx", images)
    assert 0 < np.abs(quantized - exact).max() < 0.05 * np.abs(exact).max()


def test_digits_batch_model_matches_single_image_model(
    test_images: tuple[np.ndarray, np.ndarray],
) -> None:
    images, _ = test_images
    session = onnxruntime.InferenceSession(DIGITS / "digits_cnn_batch.onnx", providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["N", 1, 8, 8]
    together = session.run(["logits"], {"image": images})[0]
    np.testing.assert_allclose(together, logits("digits_cnn.onnx", images), rtol=1e-4, atol=1e-4)


def test_train_exports_committed_model(train: ModuleType) -> None:
    committed = onnx.load(DIGITS / "digits_cnn.onnx")
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in committed.graph.initializer}
    assert sum(w.size for w in weights.values()) == 6090
    assert train.export(weights, 1).SerializeToString() == committed.SerializeToString()


def test_train_gradients_match_finite_differences(train: ModuleType) -> None:
    """Central differences (x + h, x - h) of the cross-entropy, in float64."""
    rng = np.random.default_rng(1)
    params = {name: p + 0.1 * rng.standard_normal(p.shape) for name, p in train.initial(rng).items()}
    images, labels = rng.random((4, 1, 8, 8)), np.array([1, 5, 9, 0])

    def loss(changed: dict[str, Any]) -> float:
        logit, _ = train.forward({**params, **changed}, images)
        return float((np.log(np.exp(logit).sum(1)) - logit[range(4), labels]).mean())

    gradients = train.gradients(params, images, labels)
    assert gradients.keys() == params.keys()
    for name, gradient in gradients.items():
        at = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        step = np.zeros_like(params[name])
        step[at] = 1e-5
        measured = (loss({name: params[name] + step}) - loss({name: params[name] - step})) / 2e-5
        assert measured == pytest.approx(gradient[at], rel=1e-5), name


def test_digits_files_stay_small() -> None:
    assert sum(file.stat().st_size for file in DIGITS.iterdir() if file.suffix in {".onnx", ".npz"}) < 300_000
