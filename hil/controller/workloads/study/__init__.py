"""Studies: training steps through several compilers, stage by stage, beside TensorFlow's own training."""
