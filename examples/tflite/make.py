"""Write the models of this folder anew: `python examples/tflite/make.py` (needs `pip install 'hil[tensorflow]'`).

A small convolutional network for 8x8 images of digits, trained on those of ../digits, in float32 and in int8; and a
model with an open dimension and two signatures.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
EPOCHS = 60


def images() -> tuple[np.ndarray, np.ndarray]:
    """The test images of ../digits, [n, 8, 8, 1] in 0..1, and their labels."""
    digits = np.load(HERE.parent / "digits" / "digits_test.npz")
    return digits["image"].transpose(0, 2, 3, 1), digits["label"]


def digits_model() -> keras.Model:
    """The network, trained on the few images that there are: enough to show how models are run."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([8, 8, 1], batch_size=1, name="image"),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax", name="digit"),
        ]
    )
    pictures, labels = images()
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(pictures, labels, batch_size=1, epochs=EPOCHS, verbose=0)
    return model


def write(name: str, converter: tf.lite.TFLiteConverter) -> None:
    (HERE / name).write_bytes(converter.convert())


class Scaler(tf.Module):
    """Two functions of a vector of any length."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def double(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"doubled": 2.0 * x}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.float32)])
    def scale(self, x: tf.Tensor, by: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"scaled": x * by, "total": tf.reduce_sum(x) * by}


def main() -> None:
    model = digits_model()
    write("digits.tflite", tf.lite.TFLiteConverter.from_keras_model(model))

    quantising = tf.lite.TFLiteConverter.from_keras_model(model)
    quantising.optimizations = [tf.lite.Optimize.DEFAULT]
    quantising.representative_dataset = lambda: ([picture[None]] for picture in images()[0])
    quantising.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    quantising.inference_input_type = quantising.inference_output_type = tf.int8
    write("digits_int8.tflite", quantising)

    scaler = Scaler()
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(scaler, folder, {"double": scaler.double, "scale": scaler.scale})
        write("scaler.tflite", tf.lite.TFLiteConverter.from_saved_model(folder, ["double", "scale"]))


if __name__ == "__main__":
    main()
