"""Profiles of runtimes: IREE, ONNX Runtime and ExecuTorch."""
