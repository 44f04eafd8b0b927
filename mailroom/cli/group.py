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
            ctx.fail(f"No such command {name!r}.{self._below(ctx, name) or meant(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def _below(self, ctx: click.Context, name: str) -> str:
        """Suggest the command of this name in a group of this one."""
        groups = ((each, self.get_command(ctx, each)) for each in self.list_commands(ctx))
        found = [each for each, of in groups if isinstance(of, click.Group) and name in of.list_commands(ctx)]
        return f" Did you mean: {', '.join(f'{ctx.command_path} {each} {name}' for each in found)}?" if found else ""
