"""Import PyTorch's `.pt2` programs."""
