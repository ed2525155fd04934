"""The farm's PostgreSQL database: connections, notifications and an embedded server."""
