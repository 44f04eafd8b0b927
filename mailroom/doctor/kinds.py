"""What each finding means, and what to do: the text of `mailroom explain` and of the page on the doctor's findings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding: what is found, what follows from it, and what to do."""

    what: str
    means: str
    remedy: str


KINDS = {
    "M000": Kind(
        "some checks could not look",
        "The role may not read what they read, a lock kept them out, or they failed. What they would find is unknown.",
        "Grant the role what is missing, or run the doctor as the owner of the schema. If a table was locked, M006 "
        "names who has it.",
    ),
    "M001": Kind(
        "a transaction is open for long",
        "VACUUM cannot remove rows that were deleted since it began, so each claim and delivery reads past them, "
        "slower by the minute.",
        "Have its program commit or roll back; else end its session. Where it waits for another one, end that one. "
        "`idle_in_transaction_session_timeout` ends such sessions by itself.",
    ),
    "M002": Kind(
        "a prepared transaction is left over",
        "It keeps VACUUM from removing rows, as an open transaction does, and keeps its locks, also through a restart.",
        "Ask its transaction manager what became of it, then run COMMIT PREPARED or ROLLBACK PREPARED in its database.",
    ),
    "M003": Kind(
        "a replication slot is far behind",
        "It keeps dead rows or WAL. WAL that is kept fills the disk, and then the server stops.",
        "Start what reads it, or drop the slot if it is not needed.",
    ),
    "M004": Kind(
        "a standby keeps dead rows",
        "A query on the standby is as old as that, and hot_standby_feedback keeps its rows here.",
        "End the query on the standby, or turn hot_standby_feedback off there: the command is for the standby.",
    ),
    "M005": Kind(
        "a session waits for a lock",
        "A session of Mailroom, or one that uses its tables, does not go on until the other one ends its transaction.",
        "See what the other session does. Have its program end the transaction, or end the session. It is the one at "
        "the end of the way: who waits further ahead is not in the command.",
    ),
    "M006": Kind(
        "a strong lock keeps writers out",
        "A transaction has locked a table of the node, as LOCK TABLE, ALTER TABLE or CREATE INDEX do. Sends, "
        "deliveries or reaps there wait.",
        "Have its program end the transaction, or end the session. Build indexes with CONCURRENTLY.",
    ),
    "M007": Kind(
        "autovacuum is off",
        "Nothing removes the rows that were delivered and reaped, so the tables grow and become slow. In the end the "
        "server stops writes.",
        "Turn it on.",
    ),
    "M008": Kind(
        "autovacuum is off for a table",
        "The table's dead rows are not removed, so it grows and becomes slow.",
        "Take the setting back for each table.",
    ),
    "M009": Kind(
        "autovacuum does not keep up",
        "The table has many more dead rows than its threshold, and was not vacuumed for long: workers of autovacuum "
        "are too few, too slow, or cancelled by locks.",
        "Vacuum it once. Then raise `autovacuum_max_workers` or lower `autovacuum_vacuum_cost_delay`. If M001 to M004 "
        "are found too, see to these first.",
    ),
    "M010": Kind(
        "transaction ids run out",
        "About 2^31 transactions after the oldest one that is not frozen the server refuses all writes.",
        "Freeze the database. See to M001 to M004 and M007 first, which keep it from being frozen.",
    ),
    "M011": Kind(
        "an index is not valid",
        "No query uses it, but each write pays for it: a CREATE INDEX CONCURRENTLY has failed.",
        "Build it again, or drop it if it is not Mailroom's.",
    ),
    "M012": Kind(
        "an index is missing",
        "What should be found by the index is searched for in the whole table, and what should be unique may not be.",
        "Create each again: for the next ones run the doctor again.",
    ),
    "M013": Kind(
        "the table of an inbox is not a partition",
        "Messages for the inbox cannot be delivered, or its table was left over with messages in it.",
        "Attach it. If the inbox is not wanted any more, attach it first, then run `mailroom inbox drop`.",
    ),
    "M014": Kind(
        "a partition is of no registered inbox",
        "Its row in inbox_registry was deleted by hand. Its consumers find no settings, and nothing is cleared away.",
        "Register it again; its messages stay.",
    ),
    "M015": Kind(
        "a subscription is of no inbox",
        "The inbox is gone, and its subscriptions were left. Messages of these topics may count as having a receiver.",
        "Delete them, or create the inbox.",
    ),
    "M016": Kind(
        "a trigger is off or missing",
        "Without its check the outbox takes rows that cannot be delivered; without its doorbell no writer wakes the "
        "dispatcher, which then polls; without the others copied rows overtake, or rights are not checked.",
        "Put it back. For the next one run the doctor again.",
    ),
    "M017": Kind(
        "a sequence is behind its rows",
        "The rows were copied without it. What is sent now overtakes what waits, until a number exists twice.",
        "Run the command; a dispatcher that starts does the same.",
    ),
    "M018": Kind(
        "a sequence has other settings",
        "With a cache each session has numbers of its own, so that a later message may have a smaller one. A cycle "
        "gives numbers again.",
        "Set it back.",
    ),
    "M019": Kind(
        "a sequence is nearly used up",
        "At its end each insert fails. No node counts so far by itself: the sequence was set by hand.",
        "Find out who set it. Let the sequence have all of bigint, or move to a new schema.",
    ),
    "M020": Kind(
        "the clock is above its ceiling",
        "Clocks above the durable ceiling may be given out again after a crash: the sequence or the row in `node` was "
        "changed by hand, or put back.",
        "Restart the dispatcher: at its start it raises both beyond what may have been given out.",
    ),
    "M021": Kind(
        "the clock is near its end",
        "No node counts so far by itself: a sender or a linked node has passed on a large clock. At the end nothing is "
        "delivered any more.",
        "Find the sender by `after_clock` and the linked nodes by `mailroom link status`; then move to a new schema.",
    ),
    "M022": Kind(
        "something waits, and no process leads",
        "Messages or executables are committed, or another node is to be read, and no process does it.",
        "Start it, and see in its log why it ended.",
    ),
    "M023": Kind(
        "something waits, though a process leads",
        "The leader renews its lease and does not get on: it fails each time, waits for a lock, or is far behind.",
        "The evidence has the error that it fails with: mend that. Else see its log, M005 and M006. If nothing is "
        "there, end its session: it connects again, or another one leads.",
    ),
    "M024": Kind(
        "a lease has expired, and its session lives",
        "The leader is paused or hangs, and no other process stands by: a new one would end this session.",
        "End the session, and restart its process.",
    ),
    "M025": Kind(
        "a batch does not end",
        "A worker that is alive has had its messages for long: its handler hangs or is slow. The keys of the batch "
        "wait, and the open transaction keeps VACUUM from removing rows.",
        "See what the handler does, and give it a time: `Worker(timeout_s=)`. Ending the session fails the attempt.",
    ),
    "M026": Kind(
        "a batch is of a worker that is silent",
        "The worker died or is paused, and no other worker of the inbox has accounted for its messages.",
        "Start a worker of the inbox. If the transaction is open, the worker is paused: end its session.",
    ),
    "M027": Kind(
        "no worker reaps an inbox",
        "Messages wait in it, it is not paused, and no worker sleeps or works there.",
        "Start its worker; or drop the inbox, or unsubscribe it, if the messages are not wanted.",
    ),
    "M028": Kind(
        "a crash can destroy the database",
        "With this setting off, a crash of the machine may lose commits and corrupt tables.",
        "Turn it on, unless the data are not needed after a crash.",
    ),
    "M029": Kind(
        "a crash can lose commits",
        "With synchronous_commit off a commit is answered before it is on disk: a message that was sent may be lost, "
        "and one that was handled be handled again.",
        "Set it to on. A single transaction may have it off.",
    ),
    "M030": Kind(
        "connections are nearly used up",
        "When none is left, a dispatcher that connects again is refused, as are writers. The server, a role and a "
        "database have a limit each.",
        "Have programs use pools, or raise what the evidence names: the limit of a role or of the database, or "
        "`max_connections`, which takes a restart.",
    ),
    "M031": Kind(
        "the notification queue fills",
        "A session listens and does not read, in an open transaction. When the queue is full, each commit that "
        "notifies fails, in all databases of the server.",
        "End the oldest session that is idle in transaction and listens.",
    ),
    "M032": Kind(
        "the connection leads through a pooler",
        "In transaction mode there are no session locks and no LISTEN: dispatchers and workers poll, and a dead "
        "worker is found later.",
        "Give dispatchers and workers a connection string that leads to the server itself.",
    ),
    "M033": Kind(
        "the server's version is not supported",
        "Mailroom is tested with PostgreSQL 15 to 18 only.",
        "Upgrade the server, or this program.",
    ),
    "M034": Kind(
        "the schema is of another release",
        "This program refuses to work on it. The checks that read its tables were left out.",
        "Migrate the schema if it is older, upgrade the program if it is newer.",
    ),
    "M035": Kind(
        "everybody has rights on a table",
        "Each role of the server that may connect may read or change messages.",
        "Take the rights back, and give them to the roles that need them.",
    ),
    "M036": Kind(
        "everybody may create in the schema",
        "A role may put a table of the name of an inbox, or a function, where Mailroom looks for its own.",
        "Take the right back.",
    ),
    "M037": Kind(
        "a role at work lacks rights",
        "A leader, or a worker with a batch, was deprived of a right: it fails at each try.",
        "Grant each of them again.",
    ),
    "M038": Kind(
        "row security hides rows",
        "A role that works here, or the one that asks, does not see all rows of a table. Such work is refused.",
        "Disable row security on the table, or work as its owner or with BYPASSRLS.",
    ),
    "M039": Kind(
        "the node is in another place than noted",
        "It was moved to another server or database, or is a copy of a node that lives on: then two nodes have one "
        "id. Until an operator says which, its links are refused.",
        "For a copy run the command; for a node that was moved, `mailroom node moved`.",
    ),
    "M040": Kind(
        "keys are parked",
        "A message failed too often. It and all later ones of its key wait until an operator acts.",
        "See why, then `mailroom parked replay` or `mailroom parked discard`.",
    ),
    "M041": Kind(
        "there are dead letters",
        "Messages could not be delivered, or were skipped after they failed.",
        "See why, then `mailroom dead-letter requeue` or `mailroom dead-letter discard`.",
    ),
    "M042": Kind(
        "the archive runs out of days",
        "What is reaped from inboxes that keep it goes into the last day that there is, and is dropped with that. So "
        "it is kept for less long than it should be.",
        "Start a dispatcher, which makes the days ahead. If one runs, see in its log what keeps it from that.",
    ),
    "M043": Kind(
        "a breaker is open",
        "Too many attempts of an inbox have failed, or of a prefix of its keys. Its workers claim nothing of that but "
        "one message from time to time, until one is handled.",
        "Look at what the handler calls. Once that is well, the command has workers go on at once.",
    ),
    "M044": Kind(
        "nothing flows over a link or a bridge",
        "Nothing comes from another node or a broker, or a message is not published there: it has stopped until "
        "an operator acts, or has been unreachable or failing for a minute. What is meant for it waits in the "
        "database, unless it is cut.",
        "The evidence says why, and what to do. It is tried again by itself; `resume` of the same command does so at "
        "once, and `mailroom bridge skip` leaves a message out that is refused. One that is cut has to be made anew.",
    ),
    "M045": Kind(
        "messages fail at each try",
        "Their keys wait for the next attempt, and in the end they are parked. If most keys of an inbox fail, it is "
        "the handler or what it calls, and not the messages.",
        "The command shows the errors with a text of each, and how many keys have it. Mend the handler, or put its "
        "last version back: what waits is tried again by itself. `mailroom inbox pause` saves attempts meanwhile.",
    ),
    "M046": Kind(
        "this node may lack what a bridge took from a queue",
        "The node was put back in time, or moved, and a queue deletes what is taken. Messages that came between the "
        "backup and that are neither here nor there.",
        "Ask those who sent them to send them again, or compare. Then the command, which says that it is seen to.",
    ),
    "M049": Kind(
        "a table belongs to another role than the node",
        "The owner of the node can neither grant rights on it, nor rename or migrate it.",
        "Run the command as a superuser, or as a member of both roles.",
    ),
    "M050": Kind(
        "commits wait for a synchronous standby",
        "The server answers a COMMIT once a standby has it. None answers, so every session that commits hangs with its "
        "locks: writers, dispatchers and workers. They are victims: ending them repairs nothing.",
        "Start the standby. The command goes on without it: then what is committed is on this server alone.",
    ),
    "M051": Kind(
        "a large batch of Spark does not go on",
        "It is decided, and a part of it is not in the outbox. Its job ended or fails, and no dispatcher goes on with "
        "it, or the database refuses what is left. Nothing of it comes twice.",
        "Run the job again, or start a dispatcher. The log of the one that leads says why it fails. If a table is "
        "gone, copy it from where it is, such as the database that the node was moved from. If it is nowhere, the "
        "command moves the rest and gives up what is lost.",
    ),
    "M052": Kind(
        "the server's clock was set back",
        "Times that are stored were ahead by as much. Those that lay further ahead than they can have been set count "
        "from now on: leases, rates, breakers, and the next attempts of failing keys. Ages and delays that span the "
        "change are wrong by as much.",
        "Nothing has to be repaired here. See why the clock was changed, and have the time service correct it slowly. "
        "This is told for an hour.",
    ),
    "M053": Kind(
        "workers are late",
        "Messages have waited for long in an inbox that has workers. More come than they handle, a rate or slots hold "
        "them back, or, in an inbox of total order, another node does. What fails, is parked or paused does not count.",
        "The command shows what comes and what goes, `mailroom status` what is held back. Start more workers, speed up "
        "the handler, or raise the limits of the inbox. After a large load it may only take its time.",
    ),
    "M054": Kind(
        "an inbox holds disk of a log",
        "It has not read messages that are older than its log keeps. They stay until it has, and so does the disk that "
        "they take.",
        "Start its workers, or find out why they do not get on (M027, M053, M055). If nobody needs what it has not "
        "read, drop the inbox: `mailroom inbox drop`. A log that may lose it is told so: `mailroom log set "
        "--drop-unread`.",
    ),
    "M055": Kind(
        "a lane of a log stands while others go on",
        "Keys of the lane wait. A failing key is no reason, since its messages leave the lane. A worker that has much "
        "to catch up with reads lane by lane: look again.",
        "See whether a batch does not end (M025), or is of a worker that is silent (M026). Else a session that is open "
        "has taken messages by hand (M001).",
    ),
    "M056": Kind(
        "a log dropped messages that an inbox had not read",
        "The log is told to (drop_unread), and the inbox was slower than its days. These messages are gone, and it "
        "goes on with the oldest that is there. This is told for a week.",
        "Start more workers, or have the log keep more days: `mailroom log set --keep-days`. If nothing may be lost: "
        "`mailroom log set --keep-unread`.",
    ),
}
