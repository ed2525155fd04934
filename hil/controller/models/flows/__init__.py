"""Flows: named combinations of compiler, compiler options, recipe and runtime, such as ``iree-O3``."""
