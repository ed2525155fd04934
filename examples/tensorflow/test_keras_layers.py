"""Keras layers, each in a model of its own with seeded weights; what a training step needs is in test_variables."""

import tensorflow as tf

from hil.testing import TracedModuleTestCase, compile_module, main, uniform

layers = tf.keras.layers
IMAGE, SEQUENCE, VECTOR = (8, 8, 3), (6, 4), (10,)
# Name -> what it takes (without the batch) and how the layer is made.
LAYERS = {
    "Dense": (VECTOR, lambda: layers.Dense(7)),
    "DenseGelu": (VECTOR, lambda: layers.Dense(7, "gelu")),
    "EinsumDense": (SEQUENCE, lambda: layers.EinsumDense("abc,cd->abd", (None, 5), bias_axes="d")),
    "Conv1D": (SEQUENCE, lambda: layers.Conv1D(5, 3, padding="causal")),
    "Conv2D": (IMAGE, lambda: layers.Conv2D(4, 3, padding="same")),
    "Conv2DStrided": (IMAGE, lambda: layers.Conv2D(4, 3, strides=2)),
    "Conv2DDilated": (IMAGE, lambda: layers.Conv2D(4, 3, dilation_rate=2)),
    "Conv2DGrouped": (IMAGE, lambda: layers.Conv2D(6, 3, groups=3)),
    "Conv3D": ((4, 4, 4, 2), lambda: layers.Conv3D(3, 2)),
    "Conv2DTranspose": (IMAGE, lambda: layers.Conv2DTranspose(4, 3, strides=2)),
    "DepthwiseConv2D": (IMAGE, lambda: layers.DepthwiseConv2D(3)),
    "SeparableConv2D": (IMAGE, lambda: layers.SeparableConv2D(5, 3)),
    "MaxPooling2D": (IMAGE, lambda: layers.MaxPooling2D()),
    "AveragePooling2D": (IMAGE, lambda: layers.AveragePooling2D(3, padding="same")),
    "GlobalAveragePooling2D": (IMAGE, lambda: layers.GlobalAveragePooling2D()),
    "GlobalMaxPooling1D": (SEQUENCE, lambda: layers.GlobalMaxPooling1D()),
    "BatchNormalization": (IMAGE, lambda: layers.BatchNormalization()),
    "LayerNormalization": (SEQUENCE, lambda: layers.LayerNormalization()),
    "GroupNormalization": ((4, 4, 6), lambda: layers.GroupNormalization(3)),
    "UnitNormalization": (VECTOR, lambda: layers.UnitNormalization()),
    "ReLU": (VECTOR, lambda: layers.ReLU(max_value=6.0)),
    "LeakyReLU": (VECTOR, lambda: layers.LeakyReLU()),
    "PReLU": (VECTOR, lambda: layers.PReLU()),
    "ELU": (VECTOR, lambda: layers.ELU()),
    "Softmax": (VECTOR, lambda: layers.Softmax()),
    "UpSampling2D": (IMAGE, lambda: layers.UpSampling2D()),
    "UpSamplingBilinear": (IMAGE, lambda: layers.UpSampling2D(interpolation="bilinear")),
    "ZeroPadding2D": (IMAGE, lambda: layers.ZeroPadding2D(2)),
    "Cropping2D": (IMAGE, lambda: layers.Cropping2D(1)),
    "Permute": (SEQUENCE, lambda: layers.Permute((2, 1))),
    "RepeatVector": (VECTOR, lambda: layers.RepeatVector(3)),
    "Flatten": (IMAGE, lambda: layers.Flatten()),
    "TimeDistributed": (SEQUENCE, lambda: layers.TimeDistributed(layers.Dense(3))),
    "SimpleRNN": (SEQUENCE, lambda: layers.SimpleRNN(5)),
    "LSTM": (SEQUENCE, lambda: layers.LSTM(5)),
    "LSTMSequences": (SEQUENCE, lambda: layers.LSTM(5, return_sequences=True)),
    "GRU": (SEQUENCE, lambda: layers.GRU(5)),
    "GRUBackwards": (SEQUENCE, lambda: layers.GRU(5, go_backwards=True)),
    "Bidirectional": (SEQUENCE, lambda: layers.Bidirectional(layers.LSTM(3))),
    "ConvLSTM1D": ((3, 6, 2), lambda: layers.ConvLSTM1D(2, 3)),
}


def keras_module(name, shape, make):
    """A module class with one method: the layer, on a batch of 2."""

    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.model = tf.keras.Sequential([tf.keras.Input(shape), make()])

        @tf.function(input_signature=[tf.TensorSpec((2, *shape))])
        def predict(self, x):
            return self.model(x, training=False)

    Module.__name__ = name
    return Module


def case_of(name, shape, make):
    def predict(module):
        module.predict(uniform((2, *shape)))

    tests = {"test_predict": lambda self: self.compare_backends(predict), "__module__": __name__}
    return compile_module(keras_module(name, shape, make))(type(f"{name}Test", (TracedModuleTestCase,), tests))


globals().update({f"{name}Test": case_of(name, *kind) for name, kind in LAYERS.items()})


class Attention(tf.Module):
    """Layers of several inputs, or of integers. Named, for Keras would number them from module to module."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(num_heads=2, key_dim=4, name="attention")
        self.attention.build((1, 6, 8), (1, 5, 8))
        self.plain = layers.Attention()
        self.embedding = layers.Embedding(20, 8, name="embedding")
        self.embedding.build()

    @tf.function(input_signature=[tf.TensorSpec([1, 6, 8]), tf.TensorSpec([1, 5, 8])])
    def multi_head(self, query, value):
        return self.attention(query, value)

    @tf.function(input_signature=[tf.TensorSpec([1, 6, 8]), tf.TensorSpec([1, 5, 8])])
    def dot_product(self, query, value):
        return self.plain([query, value])

    @tf.function(input_signature=[tf.TensorSpec([2, 5], tf.int32)])
    def embed(self, tokens):
        return self.embedding(tokens)


@compile_module(Attention)
class AttentionTest(TracedModuleTestCase):
    def test_multi_head(self):
        def multi_head(module):
            module.multi_head(uniform([1, 6, 8]), uniform([1, 5, 8]))

        self.compare_backends(multi_head)

    def test_dot_product(self):
        def dot_product(module):
            module.dot_product(uniform([1, 6, 8]), uniform([1, 5, 8]))

        self.compare_backends(dot_product)

    def test_embed(self):
        def embed(module):
            module.embed(uniform([2, 5], "int32", 0, 20))

        self.compare_backends(embed)


if __name__ == "__main__":
    main()
