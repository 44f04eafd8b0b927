"""`python -m spark_jobs.sweep`: drop the staging tables that no batch will need any more."""

import click

from mailroom.cli.acting import counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, say
from mailroom.cli.parameters import Number
from mailroom.values.names import shown
from spark_jobs.command import dsn_variable, job, main, node_of
from spark_jobs.write import finishing
from spark_jobs.write.staging import ABANDONED_AFTER_H, sweep


@job("sweep")
@click.option(
    "--abandoned-after-h",
    type=Number(min=0.0),
    default=ABANDONED_AFTER_H,
    show_default=True,
    help="Hours after which the job of a table counts as dead. Choose more than the longest job takes.",
)
@click.option(
    "--give-up",
    metavar="NAME",
    help="Of large batches of this name, move all that is there, and give up what is lost.",
)
@dsn_variable
@pass_call
def command(call: Call, abandoned_after_h: float, give_up: str | None, dsn_variable: str | None) -> None:
    """Drop staging tables of batches that are in the ledger, and those that were abandoned.

    Each job and each micro-batch does so after its commit. This is for what killed jobs have left: run it once a day,
    with the role of the jobs. It needs no Spark. A job whose table was dropped too early fails and sends nothing.
    """
    node = node_of(call, dsn_variable, travels=False)
    lost = None if give_up is None else finishing.give_up(node, give_up)
    swept = sweep(node, abandoned_after_h)
    if call.json:
        document({"dropped": swept} | ({} if lost is None else {"given_up": lost}))
        return
    if lost is not None:
        say(f"Gave up {counted(lost, 'message')} of {shown(give_up)}. All others of it are in the outbox.")
    say(f"Dropped {counted(swept, 'staging table')}.")


if __name__ == "__main__":
    main(command)
