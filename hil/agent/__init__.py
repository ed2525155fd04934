"""The agent: what runs on a board. Light: grpcio, protobuf, numpy and the runtime it is asked for."""
