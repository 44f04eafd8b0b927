"""Plans of the hot statements: `make sql NAME=deliver` prints one for psql, to EXPLAIN it by hand."""

from collections.abc import Iterator, Mapping
from typing import Any

import click
import psycopg

from dispatcher.delivery.deliver import DELIVER
from mailroom.sql.operation import PARAMETER, Sql
from tests.support.hot import DELIVERY, HOT


def prepared(
    sql: Sql, names: Mapping[str, str], schema: str = "mailroom", inbox: str = "shipping"
) -> tuple[str, list[str]]:
    """Return the PREPARE of a statement as `hot`, and the names of its parameters in their order."""
    rendered = sql.at(**names, schema=schema, inbox=inbox).sql
    types: dict[str, str] = {}
    for match in PARAMETER.finditer(rendered):
        types.setdefault(match[1], match[2])
    numbers = {name: nth for nth, name in enumerate(types, start=1)}
    numbered = PARAMETER.sub(lambda match: f"${numbers[match[1]]}::{match[2]}", rendered).replace("%%", "%")
    arguments = f"({', '.join(types.values())})" if types else ""
    return f"PREPARE hot{arguments} AS {numbered}", list(types)


def executed(values: list[str]) -> str:
    """Return the EXECUTE of `hot` with these values, written as in SQL."""
    return f"EXECUTE hot({', '.join(values)})" if values else "EXECUTE hot"


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return all nodes of a plan."""
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def pages(plan: list[dict[str, Any]], *tables: str) -> int:
    """Return how many pages a plan's scans of these tables have read.

    Not what the whole statement has: other tests on this server have its sessions read their catalogs anew.
    """
    return sum(
        int(each["Shared Hit Blocks"] + each["Shared Read Blocks"])
        for each in plan
        if each.get("Relation Name") in tables and each["Node Type"].endswith("Scan")
    )


def explained(connection: psycopg.Connection[Any], deliver: Sql = DELIVER) -> list[dict[str, Any]]:
    """Run a delivery as the dispatcher's session does, undo it, and return its plan with what it really did."""
    prepare, parameters = prepared(deliver, {})
    values = {"start": "0", "gaps": "'{}'", "writers": "'{}'", "rows": "1000", "bytes": "1000000"}
    with connection.transaction(force_rollback=True):
        for name, value in {**DELIVERY, "plan_cache_mode": "force_generic_plan"}.items():
            connection.execute("SELECT set_config(%s, %s, true)", [name, value])
        connection.execute(prepare.encode())
        execute = executed([values.get(each, "NULL") for each in parameters])
        row = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) {execute}".encode()).fetchone()
        connection.execute("DEALLOCATE hot")
    assert row is not None
    return list(nodes(row[0][0]["Plan"]))


def below(plan: list[dict[str, Any]], cte: str) -> list[dict[str, Any]]:
    """Return the nodes of one CTE."""
    [root] = [node for node in plan if node.get("Subplan Name") == f"CTE {cte}"]
    return list(nodes(root))


@click.command()
@click.argument("name", type=click.Choice([name for name, hot in HOT.items() if hot.is_planned]))
@click.option("--schema", default="mailroom", show_default=True)
@click.option("--inbox", default="shipping", show_default=True)
@click.option("--value", "values", metavar="NAME=SQL", multiple=True, help="A parameter, such as rows=1000; else NULL.")
@click.option("--analyze", is_flag=True, help="Run it, too, and roll it back.")
def main(name: str, schema: str, inbox: str, values: tuple[str, ...], analyze: bool) -> None:
    """Print a hot statement with its settings, for psql, which then shows how it is planned in production."""
    hot = HOT[name]
    given = dict(value.split("=", 1) for value in values)
    prepare, parameters = prepared(hot.sql, hot.names, schema, inbox)
    if unknown := given.keys() - set(parameters):
        raise click.UsageError(f"{name} has no {', '.join(sorted(unknown))}; it has {', '.join(parameters)}")
    settings = {**hot.session, "plan_cache_mode": "force_generic_plan"}
    click.echo("BEGIN;")
    for setting, value in settings.items():
        click.echo(f"SET LOCAL {setting} = '{value}';")
    click.echo(f"{prepare};")
    click.echo(f"-- {', '.join(parameters)}")
    options = "ANALYZE, BUFFERS" if analyze else "VERBOSE"
    click.echo(f"EXPLAIN ({options}) {executed([given.get(each, 'NULL') for each in parameters])};")
    click.echo("ROLLBACK;\nDEALLOCATE hot;")


if __name__ == "__main__":
    main()
