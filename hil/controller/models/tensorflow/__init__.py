"""TensorFlow functions and models: read from files and lowered to StableHLO. TensorFlow is imported on demand."""
