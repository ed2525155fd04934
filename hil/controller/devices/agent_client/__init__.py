"""Client of a board's agent, over gRPC or data connections."""
