"""Roles: grant a database role what it needs for a purpose, and nothing else."""

from mailroom.roles.granting import RightsChange, grant, grant_async, revoke, revoke_async

__all__ = ["RightsChange", "grant", "grant_async", "revoke", "revoke_async"]
