"""Tensors cut, joined, picked from, broadcast and multiplied."""

import numpy as np
import tensorflow as tf

from hil.testing import TracedModuleTestCase, compile_module, main, uniform


def spec(*shape, dtype=tf.float32):
    return tf.TensorSpec(shape, dtype)


class Broadcasting(tf.Module):
    @tf.function(input_signature=[spec(4, 1), spec(3)])
    def add(self, x, y):
        return x + y

    @tf.function(input_signature=[spec(2, 1, 3), spec(4, 1)])
    def multiply(self, x, y):
        return x * y

    @tf.function(input_signature=[spec(3)])
    def broadcast_to(self, x):
        return tf.broadcast_to(x, [5, 3])


@compile_module(Broadcasting)
class BroadcastingTest(TracedModuleTestCase):
    def test_add(self):
        def add(module):
            module.add(uniform([4, 1]), uniform([3]))

        self.compare_backends(add)

    def test_multiply(self):
        def multiply(module):
            module.multiply(uniform([2, 1, 3]), uniform([4, 1]))

        self.compare_backends(multiply)

    def test_broadcast_to(self):
        def broadcast_to(module):
            module.broadcast_to(uniform([3]))

        self.compare_backends(broadcast_to)


class Gathering(tf.Module):
    @tf.function(input_signature=[spec(6, 4), spec(3, dtype=tf.int32)])
    def rows(self, table, indices):
        return tf.gather(table, indices)

    @tf.function(input_signature=[spec(6, 4), spec(2, dtype=tf.int32)])
    def columns(self, table, indices):
        return tf.gather(table, indices, axis=1)

    @tf.function(input_signature=[spec(6, 4), spec(3, 2, dtype=tf.int32)])
    def elements(self, table, indices):
        return tf.gather_nd(table, indices)

    @tf.function(input_signature=[spec(2, 5), spec(2, 3, dtype=tf.int32)])
    def batched(self, table, indices):
        return tf.gather(table, indices, batch_dims=1)

    @tf.function(input_signature=[spec(3, 1, dtype=tf.int32), spec(3)])
    def scatter(self, indices, updates):
        return tf.scatter_nd(indices, updates, [8])

    @tf.function(input_signature=[spec(4, dtype=tf.int32)])
    def one_hot(self, indices):
        return tf.one_hot(indices, 5)


@compile_module(Gathering)
class GatheringTest(TracedModuleTestCase):
    def test_rows(self):
        def rows(module):
            module.rows(uniform([6, 4]), np.array([5, 0, 5], np.int32))

        self.compare_backends(rows)

    def test_columns(self):
        def columns(module):
            module.columns(uniform([6, 4]), np.array([3, 1], np.int32))

        self.compare_backends(columns)

    def test_elements(self):
        def elements(module):
            module.elements(uniform([6, 4]), np.array([[0, 0], [5, 3], [2, 1]], np.int32))

        self.compare_backends(elements)

    def test_batched(self):
        def batched(module):
            module.batched(uniform([2, 5]), np.array([[0, 4, 4], [1, 2, 3]], np.int32))

        self.compare_backends(batched)

    def test_scatter(self):
        def scatter(module):
            module.scatter(np.array([[1], [6], [3]], np.int32), uniform([3]))

        self.compare_backends(scatter)

    def test_one_hot(self):
        def one_hot(module):
            module.one_hot(np.array([0, 4, 2, 2], np.int32))

        self.compare_backends(one_hot)


class Joining(tf.Module):
    @tf.function(input_signature=[spec(2, 3), spec(2, 5)])
    def concat(self, x, y):
        return tf.concat([x, y], axis=1)

    @tf.function(input_signature=[spec(2, 3), spec(2, 3)])
    def stack(self, x, y):
        return tf.stack([x, y], axis=-1)

    @tf.function(input_signature=[spec(6, 4)])
    def split(self, x):
        return tf.split(x, [1, 2, 3])

    @tf.function(input_signature=[spec(5, 6)])
    def strided(self, x):
        return {"even": x[::2, 1:-1], "backwards": x[::-1], "column": x[:, 2, tf.newaxis]}

    @tf.function(input_signature=[spec(2, 3)])
    def pad(self, x):
        return tf.pad(x, [[1, 0], [2, 3]], constant_values=7.0)

    @tf.function(input_signature=[spec(2, 3, 4)])
    def transpose(self, x):
        return tf.reshape(tf.transpose(x, [2, 0, 1]), [8, 3])

    @tf.function(input_signature=[spec(2, 3)])
    def tile(self, x):
        return tf.tile(x, [2, 2])


@compile_module(Joining)
class JoiningTest(TracedModuleTestCase):
    def test_concat(self):
        def concat(module):
            module.concat(uniform([2, 3]), uniform([2, 5]))

        self.compare_backends(concat)

    def test_stack(self):
        def stack(module):
            module.stack(uniform([2, 3]), uniform([2, 3]))

        self.compare_backends(stack)

    def test_split(self):
        def split(module):
            module.split(uniform([6, 4]))

        self.compare_backends(split)

    def test_strided(self):
        def strided(module):
            module.strided(uniform([5, 6]))

        self.compare_backends(strided)

    def test_pad(self):
        def pad(module):
            module.pad(uniform([2, 3]))

        self.compare_backends(pad)

    def test_transpose(self):
        def transpose(module):
            module.transpose(uniform([2, 3, 4]))

        self.compare_backends(transpose)

    def test_tile(self):
        def tile(module):
            module.tile(uniform([2, 3]))

        self.compare_backends(tile)


class LinearAlgebra(tf.Module):
    @tf.function(input_signature=[spec(4, 5), spec(5, 3)])
    def matmul(self, x, y):
        return x @ y

    @tf.function(input_signature=[spec(2, 4, 5), spec(2, 3, 5)])
    def batch_matmul(self, x, y):
        return tf.matmul(x, y, transpose_b=True)

    @tf.function(input_signature=[spec(2, 4, 5), spec(5, 3)])
    def einsum(self, x, y):
        return tf.einsum("bij,jk->bki", x, y)

    @tf.function(input_signature=[spec(1, 8, 8, 3), spec(3, 3, 3, 4)])
    def conv2d(self, x, kernel):
        return tf.nn.conv2d(x, kernel, strides=2, padding="SAME")

    @tf.function(input_signature=[spec(3, 6)])
    def reduce(self, x):
        return tf.reduce_sum(x, 0), tf.reduce_max(x, 1), tf.reduce_mean(x), tf.argmax(x, 1)

    @tf.function(input_signature=[spec(3, 6)])
    def top_k(self, x):
        return tf.math.top_k(x, 3)

    @tf.function(input_signature=[spec(3, 6)])
    def cumsum(self, x):
        return tf.cumsum(x, 1)


@compile_module(LinearAlgebra)
class LinearAlgebraTest(TracedModuleTestCase):
    def test_matmul(self):
        def matmul(module):
            module.matmul(uniform([4, 5]), uniform([5, 3]))

        self.compare_backends(matmul)

    def test_batch_matmul(self):
        def batch_matmul(module):
            module.batch_matmul(uniform([2, 4, 5]), uniform([2, 3, 5]))

        self.compare_backends(batch_matmul)

    def test_einsum(self):
        def einsum(module):
            module.einsum(uniform([2, 4, 5]), uniform([5, 3]))

        self.compare_backends(einsum)

    def test_conv2d(self):
        def conv2d(module):
            module.conv2d(uniform([1, 8, 8, 3]), uniform([3, 3, 3, 4]))

        self.compare_backends(conv2d)

    def test_reduce(self):
        def reduce(module):
            module.reduce(uniform([3, 6]))

        self.compare_backends(reduce)

    def test_top_k(self):
        def top_k(module):
            module.top_k(uniform([3, 6]))

        self.compare_backends(top_k)

    def test_cumsum(self):
        def cumsum(module):
            module.cumsum(uniform([3, 6]))

        self.compare_backends(cumsum)


if __name__ == "__main__":
    main()
