"""What runs many cases: jobs, suites, bundles, studies, checks of boards."""
