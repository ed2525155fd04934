"""Compile TensorFlow graphs with tfcompile."""
