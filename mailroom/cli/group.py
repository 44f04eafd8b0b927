"""Groups of sub-commands that suggest what was meant."""

import click

from mailroom.values.names import meant


class Group(click.Group):
    """A group that suggests the closest name for an unknown command."""

    group_class = type  # sub-groups are of this class too

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the sub-command; raises `click.UsageError` where there is none."""
        name = args[0]
        # What begins like an option is one: click says so. While a shell completes, nothing is wrong.
        if not name.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}.{meant(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)
