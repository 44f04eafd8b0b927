"""Webhooks: each message is posted to a URL, signed as Standard Webhooks says."""

from dispatcher.bridges.webhook.publisher import WebhookPublisher as WebhookPublisher
