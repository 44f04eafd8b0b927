"""What Mailroom knows of webhooks; no client is imported for it."""

from dispatcher.bridges.webhook.url import stored_url
from mailroom.bridges.broker import Broker, PublishesTo

WEBHOOK = Broker(
    "webhook",
    "a webhook",
    "URL",
    about="{topic} in its path stands for --topic",
    publishes=PublishesTo(
        "dispatcher.bridges.webhook.publisher:WebhookPublisher", "key", formats=("cloudevents",), is_asked=False
    ),
    otherwise="Webhooks are taken in by a server of its own: mailroom bridge serve",
    check_address=stored_url,
    options=("url", "secrets", "unsigned", "http", "private"),
    library="httpcore",
    install="pip install 'pg-mailroom[webhook]'",
    tested="Standard Webhooks v1, httpcore from 1.0.5",
    commands=("outbox.webhooks.cli:serve",),
)
