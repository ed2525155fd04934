"""Messages to webhooks: signature, formats and delivery. This package decides nothing about events."""
