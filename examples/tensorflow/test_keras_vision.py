"""Keras's vision models with random weights. The larger ones are slow: `pytest -m slow test_keras_vision.py`."""

import keras
import pytest
import tensorflow as tf

from hil.testing import TracedModuleTestCase, compile_module, main, uniform

SMALL, LARGE = 64, 224


def vision_module(name, size, **settings):
    """A module class with one method: the model of that name, on one image."""

    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            make = getattr(keras.applications, name)
            self.model = make(weights=None, classes=10, input_shape=(size, size, 3), **settings)

        @tf.function(input_signature=[tf.TensorSpec([1, size, size, 3])])
        def predict(self, images):
            return self.model(images, training=False)

    Module.__name__ = name
    return Module


def predict_small(module):
    module.predict(uniform([1, SMALL, SMALL, 3]), atol=1e-4)


def predict_large(module):
    module.predict(uniform([1, LARGE, LARGE, 3]), atol=1e-4)


@compile_module(vision_module("MobileNet", SMALL, alpha=0.25))
class MobileNetTest(TracedModuleTestCase):
    def test_predict(self):
        self.compare_backends(predict_small)


@compile_module(vision_module("MobileNetV2", SMALL, alpha=0.35))
class MobileNetV2Test(TracedModuleTestCase):
    def test_predict(self):
        self.compare_backends(predict_small)


@pytest.mark.slow
@compile_module(vision_module("MobileNetV3Small", SMALL))
class MobileNetV3SmallTest(TracedModuleTestCase):
    def test_predict(self):
        self.compare_backends(predict_small)


@pytest.mark.slow
@compile_module(vision_module("EfficientNetB0", SMALL))
class EfficientNetB0Test(TracedModuleTestCase):
    def test_predict(self):
        self.compare_backends(predict_small)


@pytest.mark.slow
@compile_module(vision_module("DenseNet121", SMALL))
class DenseNet121Test(TracedModuleTestCase):
    def test_predict(self):
        self.compare_backends(predict_small)


@pytest.mark.slow
@compile_module(vision_module("NASNetMobile", LARGE))
class NASNetMobileTest(TracedModuleTestCase):
    def test_predict(self):
        self.compare_backends(predict_large)


@pytest.mark.slow
@compile_module(vision_module("ResNet50", LARGE))
class ResNet50Test(TracedModuleTestCase):
    def test_predict(self):
        self.compare_backends(predict_large)


if __name__ == "__main__":
    main()
