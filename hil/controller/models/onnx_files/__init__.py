"""Read and change ONNX models."""
