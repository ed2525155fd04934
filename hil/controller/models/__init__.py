"""Import and convert models, apply flows, and make inputs."""
