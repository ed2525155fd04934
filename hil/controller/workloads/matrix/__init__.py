"""The same cases on several targets: boards or kinds of hardware, flows, runtimes, in one run and one report."""
