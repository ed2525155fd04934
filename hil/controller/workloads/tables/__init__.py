"""Tables of stored benches, evaluations and traces, for data frames."""
