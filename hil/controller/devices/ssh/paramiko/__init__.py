"""Connections through paramiko, for hosts without an OpenSSH client."""
