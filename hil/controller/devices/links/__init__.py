"""Links: connections from the controller to an agent."""
