"""The simulator: the agent's own server with described devices and faults that can be switched on."""
