"""Connections through the OpenSSH client."""
