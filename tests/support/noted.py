"""What pytest matches of an error of Mailroom: its text, and the note that names its code."""

END = r"\nMR-[a-z-]+: see `mailroom explain MR-[a-z-]+`\Z"  # behind a pattern of the whole text
