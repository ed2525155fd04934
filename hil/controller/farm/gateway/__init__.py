"""The gateway: what users and hosts talk to, and the only one that talks to the farm's database."""
