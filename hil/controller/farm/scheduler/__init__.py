"""Scheduling decisions as pure functions: job assignment, board states, retries. No SQL, no gRPC."""
