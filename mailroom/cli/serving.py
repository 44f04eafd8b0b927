"""`--metrics HOST:PORT` of the commands that run until they are stopped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import click

from mailroom.health import Probed
from mailroom.metrics.endpoint import Endpoint
from mailroom.metrics.family import Family, Samples
from mailroom.metrics.process import ProcessMetrics
from mailroom.metrics.scrape import Reading, Scrape
from mailroom.session.home import Home

METRICS_VARIABLE = "MAILROOM_METRICS"

metrics_option = click.option(
    "--metrics",
    "address",
    metavar="HOST:PORT",
    envvar=METRICS_VARIABLE,
    help="Answer /metrics, /livez, /readyz and /startupz here; :9464 is that port of all interfaces.",
)


@contextmanager
def serving(
    address: str | None,
    probed: Sequence[Probed],
    homes: Mapping[str, Callable[[], Home]],
    asking: Reading | None = None,
    others: Sequence[Callable[[], dict[Family, Samples]]] = (),
) -> Iterator[None]:
    """Answer at `address` meanwhile, if one is given: about what is `probed`, and with the metrics of each schema.

    `homes` says by schema where the database is, `asking` what it is asked at each look, `others` give more.
    """
    with ExitStack() as ends:
        if address is not None:
            scrapes = []
            for schema, home in homes.items():
                process = ProcessMetrics(schema)
                ends.callback(process.listen())
                scrapes.append(Scrape(home, process, schema=schema, asking=asking, others=others))
            ends.enter_context(Endpoint(address, probed, scrapes))
        yield
