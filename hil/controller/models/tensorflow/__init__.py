"""TensorFlow functions and models: lowered to StableHLO, opened from files. TensorFlow is imported when it is used."""
