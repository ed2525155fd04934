"""Agent, which runs on a board. The package needs only grpcio, protobuf, numpy and the requested runtime."""
