"""The campaign of links: nodes that read each other, under load and under fire; `make links-soak`.

Each node has a server of its own and two daemons. They are a ring: a node's plain inbox gets the messages of the node
before it, and its total inbox those of all nodes. What is sent and what is handled is noted in ledgers, by the very
transactions that do it. A part of what is handled is sent on, as an answer is sent after a question.

Faults are made in rounds. After each, everything must come to an end, and the ledgers are checked (`checks`). So what
waits for ever is found too, and a campaign may last as long as one likes.
"""
