"""Workloads that run many cases: jobs, suites, bundles, studies and board checks."""
