"""Published sessions: sending, receiving and storing."""
