"""Webhooks: requests from outside that become messages."""
