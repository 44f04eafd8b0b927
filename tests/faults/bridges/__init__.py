"""The campaign of bridges: two nodes with a Kafka between them, under load and under fire; `make bridges-soak`.

Each node has a server of its own and two daemons. One publishes to two topics, to one at least once and to the other
exactly once; the other one takes both in. What is sent and what is handled is noted in ledgers, by the very
transactions that do it, and the log at the broker is read by a consumer of the campaign's own.

Faults are made in rounds. After each, everything must come to an end, and the ledgers are checked (`checks`).
"""
