"""Output for people: console, live output, prompts, pictures and texts."""
