"""`hil farm`: jobs, leases and the farm's services."""
