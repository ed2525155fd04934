"""Mathematics, element by element: tests made for each function, dtype and shape. Those of 64 bits are marked slow."""

import numpy as np
import pytest
import tensorflow as tf

from hil.testing import TracedModuleTestCase, compile_module, main

SHAPES = {"scalar": (), "vector": (7,), "cube": (2, 3, 4)}
FLOATS = ("float32", "float64")
NUMBERS = (*FLOATS, "int32", "int64")
# What numbers a function is tried on.
ANY, POSITIVE, UNIT = (-4.0, 4.0), (0.1, 9.0), (-0.99, 0.99)
# Function -> how many arguments, which dtypes, which numbers.
FUNCTIONS = {
    **{name: (1, NUMBERS, ANY) for name in ("abs", "negative", "sign", "square")},
    **{name: (1, FLOATS, POSITIVE) for name in ("sqrt", "rsqrt", "log", "log1p", "lgamma", "digamma")},
    **{name: (1, FLOATS, UNIT) for name in ("acos", "asin", "atanh")},
    **{name: (1, FLOATS, ANY) for name in ("ceil", "floor", "round", "rint", "exp", "expm1", "sigmoid", "softplus")},
    **{
        name: (1, FLOATS, ANY) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "atan", "asinh", "erf", "erfc")
    },
    **{name: (2, NUMBERS, ANY) for name in ("add", "subtract", "multiply", "maximum", "minimum", "squared_difference")},
    **{name: (2, NUMBERS, POSITIVE) for name in ("floordiv", "floormod")},
    **{name: (2, NUMBERS, ANY) for name in ("equal", "not_equal", "less", "greater_equal")},
    **{name: (2, FLOATS, POSITIVE) for name in ("divide", "pow", "atan2", "xdivy", "xlogy")},
}


def module_of(name, count, dtype):
    """A module class with a method for each shape; a compiler may have the function for some dtypes only."""
    function = getattr(tf.math, name)
    methods = {}
    for shape, dims in SHAPES.items():
        signature = [tf.TensorSpec(dims, dtype)] * count
        methods[shape] = tf.function(lambda self, *x: function(*x), input_signature=signature, autograph=False)
    return type(f"{name.title().replace('_', '')}_{dtype}", (tf.Module,), methods)


def case_of(name, count, limits, dtype):
    """A test case with one test, which calls the methods of all shapes."""

    def shapes(module):
        for shape, dims in SHAPES.items():
            numbers = [np.random.uniform(*limits, dims).astype(dtype) for _ in range(count)]
            if "int" in dtype and limits is POSITIVE:
                numbers = [number + np.array(1, dtype) for number in numbers]
            getattr(module, shape)(*numbers)

    module = module_of(name, count, dtype)
    tests = {"test_shapes": lambda self: self.compare_backends(shapes), "__module__": __name__}
    case = type(f"{module.__name__}_Test", (TracedModuleTestCase,), tests)
    case = compile_module(module)(case)
    return pytest.mark.slow(case) if "64" in dtype else case


cases = [case_of(name, count, limits, dtype) for name, (count, dtypes, limits) in FUNCTIONS.items() for dtype in dtypes]
globals().update({case.__name__: case for case in cases})

if __name__ == "__main__":
    main()
