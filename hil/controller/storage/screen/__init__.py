"""Output for the user: console, live output, prompts, pictures and texts."""
