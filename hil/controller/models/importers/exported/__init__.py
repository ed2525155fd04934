"""Import of PyTorch's `.pt2` programs."""
