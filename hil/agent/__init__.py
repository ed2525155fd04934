"""The agent that runs on a board. It needs only grpcio, protobuf, numpy and the requested runtime."""
