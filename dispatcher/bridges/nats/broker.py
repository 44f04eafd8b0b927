"""What Mailroom knows of NATS JetStream; no client is imported for it."""

from mailroom.bridges.broker import Broker, PublishesTo, TakesFrom

NATS = Broker(
    "nats",
    "NATS",
    "URL[,...]",
    about="streams of JetStream, by some of its servers",
    publishes=PublishesTo("dispatcher.bridges.nats.publisher:NatsPublisher", "bridge", "always"),
    takes_from=TakesFrom("dispatcher.bridges.nats.source:NatsSource", topics="streams"),
    options=(
        "user", "password", "token", "tls_hostname", "credentials", "nkey_seed_file", "tls_ca", "tls_cert", "tls_key",
    ),
    library="nats",
    install="pip install 'pg-mailroom[nats]'",
    tested="NATS 2.9, nats-py from 2.9",
    reserved_prefixes=("nats-",),  # they tell a server what to do
)  # fmt: skip
