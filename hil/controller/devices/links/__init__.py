"""Links: how the controller gets to an agent."""
