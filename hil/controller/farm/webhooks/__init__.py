"""Webhooks of a farm: settings, outbox in the database, and delivery by the gateways."""
