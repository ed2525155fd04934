"""Branches and loops."""

import numpy as np
import tensorflow as tf

from hil.testing import TracedModuleTestCase, compile_module, main, uniform

SCALAR = tf.TensorSpec([], tf.int32)


class ControlFlow(tf.Module):
    @tf.function(input_signature=[SCALAR])
    def collatz(self, n):
        """How many steps lead to 1."""
        steps = 0
        while n > 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
        return steps

    @tf.function(input_signature=[SCALAR])
    def fibonacci(self, n):
        first, second = tf.constant(0), tf.constant(1)
        for _ in tf.range(n):
            first, second = second, first + second
        return first

    @tf.function(input_signature=[tf.TensorSpec([4])])
    def positive_or_doubled(self, x):
        if tf.reduce_sum(x) > 0:
            return x
        else:
            return 2.0 * x

    @tf.function(input_signature=[SCALAR, tf.TensorSpec([3])])
    def switch(self, which, x):
        return tf.switch_case(which, [lambda: x + 1.0, lambda: x * x, lambda: -x])

    @tf.function(input_signature=[tf.TensorSpec([5, 3]), tf.TensorSpec([3, 3])])
    def rows_one_by_one(self, rows, matrix):
        results = tf.TensorArray(tf.float32, 5)
        state = tf.zeros([1, 3])
        for step in tf.range(5):
            state = tf.tanh(state @ matrix + rows[step])
            results = results.write(step, state[0])
        return results.stack(), state


@compile_module(ControlFlow)
class ControlFlowTest(TracedModuleTestCase):
    def test_collatz(self):
        def collatz(module):
            for number in (1, 2, 7, 27):
                module.collatz(np.int32(number))

        self.compare_backends(collatz)

    def test_fibonacci(self):
        def fibonacci(module):
            for number in (0, 1, 2, 20):
                module.fibonacci(np.int32(number))

        self.compare_backends(fibonacci)

    def test_branch(self):
        def branch(module):
            module.positive_or_doubled(np.array([1, 2, 3, -4], np.float32))
            module.positive_or_doubled(np.array([1, 2, 3, -9], np.float32))

        self.compare_backends(branch)

    def test_switch(self):
        def switch(module):
            for which in range(3):
                module.switch(np.int32(which), uniform([3]))

        self.compare_backends(switch)

    def test_rows_one_by_one(self):
        def rows_one_by_one(module):
            module.rows_one_by_one(uniform([5, 3]), uniform([3, 3]))

        self.compare_backends(rows_one_by_one)


if __name__ == "__main__":
    main()
