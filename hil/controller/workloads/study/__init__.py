"""Studies: training steps through multiple compilers, stage by stage, compared with TensorFlow's training."""
