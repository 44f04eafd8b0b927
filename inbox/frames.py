"""Frames: where an exception came from, as a log may show it: files, lines and code, and never a value."""

import traceback
from pathlib import Path

OURS = str(Path(__file__).parent / "_")[:-1]
CAUSES = 5  # of one error; a longer chain is cut


def frames(error: BaseException) -> str:
    """Return the frames of an error from the handler on, and of what caused it, as lines to be logged behind a text.

    The errors are named by their class only, since their texts may hold what a message holds.
    """
    text = ""
    for nth, each in enumerate(_chain(error)):
        stack = traceback.extract_tb(each.__traceback__)
        ours = [nth for nth, frame in enumerate(stack) if frame.filename.startswith(OURS)]
        # Those of whatever ran the worker, and the worker's own, stand before the handler's.
        del stack[: next((nth + 1 for nth in ours if nth + 1 not in ours), 0)]
        if nth:
            text += f"\ncaused by {type(each).__name__}"
        text += "".join(f"\n{line.rstrip()}" for line in stack.format())
    return text


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain and len(chain) < CAUSES:
        chain.append(found)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return chain
