"""Projects: create a project, show the effective settings, and check the environment."""
