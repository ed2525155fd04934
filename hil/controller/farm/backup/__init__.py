"""Backup and restore of a farm: database, stored files and settings in an archive."""
