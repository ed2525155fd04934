"""Agent that runs on a board. This package needs only grpcio, protobuf, numpy and the requested runtime."""
