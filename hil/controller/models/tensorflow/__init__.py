"""Read TensorFlow models from files, and lower functions to StableHLO. TensorFlow is imported on demand."""
