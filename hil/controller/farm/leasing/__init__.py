"""Leases of boards: submissions, queue, allocation and transitions."""
