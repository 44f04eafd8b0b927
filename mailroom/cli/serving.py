"""`--metrics HOST:PORT` and `--statistics` of the commands that run until they are stopped."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import click

from mailroom.health import Probed
from mailroom.metrics.endpoint import Endpoint
from mailroom.metrics.family import Family, Samples
from mailroom.metrics.library import recording
from mailroom.metrics.process import ProcessMetrics
from mailroom.metrics.scrape import Reading, Scrape
from mailroom.session.home import Home

METRICS_VARIABLE = "MAILROOM_METRICS"
STATISTICS_VARIABLE = "MAILROOM_STATISTICS"

metrics_option = click.option(
    "--metrics",
    "address",
    metavar="HOST:PORT",
    envvar=METRICS_VARIABLE,
    help="Answer /metrics, /livez, /readyz and /startupz here; :9464 is that port of all interfaces.",
)
statistics_option = click.option(
    "--statistics",
    is_flag=True,
    envvar=STATISTICS_VARIABLE,
    help="Write once a minute what happened, for `mailroom statistics`; kept for 48 hours.",
)


@contextmanager
def serving(
    address: str | None,
    probed: Sequence[Probed],
    homes: Mapping[str, Callable[[], Home]],
    asking: Reading | None = None,
    others: Sequence[Callable[[], dict[Family, Samples]]] = (),
    *,
    statistics: bool = False,
) -> Iterator[None]:
    """Answer at `address` meanwhile, if one is given: about what is `probed`, and with the metrics of each schema.

    `homes` says by schema where the database is, `asking` what it is asked at each look, `others` give more. With
    `statistics` it also writes those of each schema.
    """
    with ExitStack() as ends:
        counts = {}
        if address is not None or statistics:
            for schema in homes:
                counts[schema] = ProcessMetrics(schema)
                ends.callback(counts[schema].listen())
        if statistics:
            for schema, home in homes.items():
                ends.enter_context(recording(home, counts[schema], schema))
        if address is not None:
            scrapes = [
                Scrape(home, counts[schema], schema=schema, asking=asking, others=others)
                for schema, home in homes.items()
            ]
            ends.enter_context(Endpoint(address, probed, scrapes))
        # Modules stay as long as the process. A first collection that went over them would stop all messages for about
        # 100 ms, at some moment under load.
        gc.collect()
        gc.freeze()
        ends.callback(gc.unfreeze)
        yield
