"""Scheduling decisions as pure functions: who gets which board, what becomes of boards and jobs. No SQL, no gRPC."""
