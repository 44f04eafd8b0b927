"""Help that fits the terminal: lines that click does not wrap, such as examples, are folded."""

import click


class HelpFormatter(click.HelpFormatter):
    """Folds the lines of a paragraph that is marked with a backslash and b, which click leaves as they are.

    An example of the command goes on behind a backslash, so that it can be pasted.
    """

    def write_text(self, text: str) -> None:
        """Write a text, and fold what is too wide."""
        before = len(self.buffer)
        super().write_text(text)
        written = "".join(self.buffer[before:])
        self.buffer[before:] = ["\n".join(part for line in written.split("\n") for part in self._folded(line))]

    def _folded(self, line: str) -> list[str]:
        indent = line[: len(line) - len(line.lstrip())]
        is_command, folded = "mailroom " in line, []
        line, comment, text = line.partition("  # ") if len(line) > self.width else (line, "", "")
        if comment:
            return [*self._folded(line.rstrip()), *self._folded(f"{indent}    # {text}")]
        while len(line) > self.width:
            room = self.width - 2 * is_command
            at = max((n for n in range(len(indent) + 4, room) if line[n] == " "), default=room)
            folded.append(line[:at] + " \\" * is_command)
            line = f"{indent}    {line[at:].lstrip()}"
        return [*folded, line]


class Context(click.Context):
    """A context whose help is written so."""

    formatter_class = HelpFormatter
