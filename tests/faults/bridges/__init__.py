"""The campaign of bridges: two nodes with brokers between them, under load and under fire; `make bridges-soak`.

Each node has a server of its own and two daemons. One publishes to two topics of Kafka, to one at least once and to the
other exactly once, to a stream of NATS and to a queue of RabbitMQ; the other one takes all of them in, and publishes to
a work queue of NATS, from which a customer of the campaign's takes everything at once. What is sent and what is handled
is noted in ledgers, by the very transactions that do it. Logs at the brokers are read by consumers of the campaign's.

Faults are made in rounds. After each, everything must come to an end, and the ledgers are checked (`checks`). What a
broker loses of what it had (`losses`) is announced by a bridge that stops; the campaign resumes it, as an operator.
"""
