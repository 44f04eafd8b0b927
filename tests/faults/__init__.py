"""Faults: a node under load is broken in every way we know, and its ledgers are held against the guarantees.

`python -m tests.faults` runs a campaign: one durable server, writers, dispatchers, workers and reapers as processes of
their own, and faults one after the other. All of them write ledgers inside their own transactions (`ledger`); at rest
the checker (`invariants`) compares the ledgers with the node's tables. `--mutants` breaks a rule of Mailroom in those
processes and demands that the checker notices.

From the outside in: `__main__` (options, verdict), `campaign` (rounds), `stage` (server, network, processes), `matrix`
(failpoint x action) and `kinds` (faults from outside), `role` and `role_*` (what the processes do), `failpoints` and
`awaits` (where they can be stopped), `mutants`, `report`.

`python -m tests.faults.links` is a campaign of its own with the same means: several nodes that read each other.
"""
