"""Webhooks: each message is posted to a URL, signed as Standard Webhooks says."""
