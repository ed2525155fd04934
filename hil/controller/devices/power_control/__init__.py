"""Switch and recover boards."""
