"""Groups of sub-commands that suggest what was meant."""

from difflib import get_close_matches

import click


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
            meant = get_close_matches(name, self.list_commands(ctx), n=1)
            ctx.fail(f"No such command {name!r}.{f' Did you mean {meant[0]!r}?' if meant else ''}")
        return super().resolve_command(ctx, args)
