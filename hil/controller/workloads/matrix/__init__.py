"""Matrix runs: the same cases on multiple targets (boards, hardware types, flows, runtimes) with a common report."""
