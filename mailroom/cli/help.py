"""Help that fits the terminal: lines that click does not wrap, such as examples, are folded."""

from collections.abc import Iterable

import click


class HelpFormatter(click.HelpFormatter):
    """Folds the lines of a paragraph that is marked with a backslash and b, which click leaves as they are.

    An example of the command goes on after a backslash, so that it can be pasted.
    """

    def write_text(self, text: str) -> None:
        """Write a text, and fold what is too wide."""
        before = len(self.buffer)
        super().write_text(text)
        self._fold(before)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write a list of options, and fold an option with many choices."""
        before = len(self.buffer)
        super().write_dl(list(rows), col_max, col_spacing)
        self._fold(before)

    def _fold(self, before: int) -> None:
        written = "".join(self.buffer[before:])
        self.buffer[before:] = ["\n".join(part for line in written.split("\n") for part in self._folded(line))]

    def _folded(self, line: str) -> list[str]:
        if len(line) <= self.width:
            return [line]
        code, _, comment = line.partition("  # ")
        indent = line[: len(line) - len(line.lstrip())] + "    "
        folded = self._broken(code.rstrip(), indent, " \\" if "mailroom " in code else "")
        return [*folded, *(self._broken(f"{indent}# {comment}", f"{indent}# ", "") if comment else [])]

    def _broken(self, line: str, indent: str, end: str) -> list[str]:
        """Break a line at blanks or after |. All parts but the last have this end, all but the first this indent."""
        parts = []
        while len(line) > self.width:
            room = self.width - len(end)
            at = max(
                (nth for nth in range(len(indent) + 1, room + 1) if line[nth] == " " or line[nth - 1] == "|"),
                default=room,
            )
            parts.append(line[:at] + end)
            line = indent + line[at:].lstrip()
        return [*parts, line]


class Context(click.Context):
    """A context whose help is written so."""

    formatter_class = HelpFormatter
