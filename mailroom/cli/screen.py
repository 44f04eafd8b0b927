"""What `mailroom top` draws of a look: lines that fit the width and height, with what is in trouble first."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mailroom.cli.output import duration, one_line
from mailroom.figures.keys import KeyLook
from mailroom.figures.leaders import DispatcherStatus
from mailroom.metrics.look import BatchLook, ErrorLook, InboxLook, Look

GAP = 2
LEAST = 8  # of a column of texts that does not fit
WRONG = "bold red"
FAINT = "dim"
HEADING = "bold"
# Lines of each part beside the inboxes, which get the rest.
MOST = {"troubles": 8, "keys": 6, "batches": 5, "errors": 6}
FEW_INBOXES = 6


@dataclass(frozen=True, slots=True)
class ScreenColumn:
    """A column: texts are narrowed if they do not fit, numbers never; what is `extra` goes first."""

    heading: str
    cells: Sequence[str]
    is_number: bool = False
    extra: bool = False


def screen(look: Look, width: int, height: int, *, interval_s: float, ends_by: str = "") -> list[Text]:
    """Return at most `height` lines of at most `width` cells. `ends_by` says how to end a live screen."""
    head = _head(look, width, interval_s, ends_by)
    troubles = [
        Text(("  " if nth else "! ") + line.plain.rstrip(), WRONG)
        for each in look.troubles
        for nth, line in enumerate(_wrapped(one_line(f"{each.what}: {each.command}"), width - 2))
    ]
    if len(troubles) > MOST["troubles"]:
        troubles = [*troubles[: MOST["troubles"] - 1], Text("! and more: mailroom doctor", WRONG)]
    lines = [*head, *troubles]
    dead = [each.alive is False for each in look.batches]
    parts = {
        "keys": _part("KEYS THAT WAIT", _keys(look.keys, look), [], width),
        "batches": _part("BATCHES IN HAND", _batches(look.batches), dead, width),
        "errors": _part("LAST ERRORS", _errors(look.errors), [], width),
    }  # fmt: skip
    room = height - len(lines) - min(FEW_INBOXES, len(look.inboxes) + 2)
    taken: list[Text] = []
    for name, part in parts.items():
        of = min(len(part), MOST[name] + 1, room - len(taken))
        if part and of >= 3:  # the title, the headings and a row
            taken += _cut(part, of)
    lines += _inbox_part(look.inboxes, width, height - len(lines) - len(taken)) + taken
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _inbox_part(inboxes: Sequence[InboxLook], width: int, height: int) -> list[Text]:
    if not inboxes:
        return [Text(), Text("There is no inbox: mailroom inbox create NAME --subscribe TOPIC")]
    shown = inboxes[: max(height - 2, 0)]
    if len(shown) < len(inboxes):
        shown = shown[:-1]
    lines = _part("", _inboxes(shown), [each.is_in_trouble for each in shown], width)
    if len(shown) < len(inboxes):
        lines.append(Text(f"and {len(inboxes) - len(shown):,} more of {len(inboxes):,}", FAINT))
    return lines


def _head(look: Look, width: int, interval_s: float, ends_by: str) -> list[Text]:
    clock = f"{look.at:%H:%M:%S} UTC, every {interval_s:g} s"
    paused = sum(each.paused for each in look.inboxes)
    paused_too = f"  paused inboxes {paused:,}" if paused else ""
    waiting = (
        f"outbox oldest {duration(look.outbox_oldest_s)}  scheduled {look.scheduled:,}  "
        f"parked {look.parked_messages:,}  dead letters {look.dead_letters:,}{paused_too}"
    )
    facts = [
        f"{one_line(look.node)} ({look.schema})  {clock}{f'; {ends_by}' if ends_by else ''}",
        f"sent {rate(look.sent_per_s)}  delivered {rate(look.delivered_per_s)}  reaped {rate(look.reaped_per_s)}",
        waiting,
        "  ".join([*map(_leader, look.leaders), *_unled(look), f"worker processes {look.processes:,}"]),
    ]
    if look.sample_age_s >= 10:
        facts.append(f"ages and keys are of {duration(look.sample_age_s)} ago")
    return [
        Text(line.plain.rstrip(), HEADING if not nth else "") for nth, fact in enumerate(facts)
        for line in _wrapped(fact, width)
    ]  # fmt: skip


def _unled(look: Look) -> list[str]:
    return [] if "dispatcher" in {each.role for each in look.leaders} else ["dispatcher NOBODY LEADS"]


def _leader(each: DispatcherStatus) -> str:
    host = one_line(each.host)
    if not each.leads:
        return f"{each.role} NOBODY LEADS"
    state = "FAILS" if each.failing else each.state
    return f"{each.role} {host} pid {each.pid} {state}, lease {duration(each.lease_left_s)}"


def _inboxes(inboxes: Sequence[InboxLook]) -> list[ScreenColumn]:
    return [
        ScreenColumn("INBOX", [each.name for each in inboxes]),
        ScreenColumn("WAITING", ["?" if each.waiting is None else f"{each.waiting:,}" for each in inboxes], True),
        ScreenColumn("OLDEST", [duration(each.oldest_s) for each in inboxes], True),
        ScreenColumn("REAPED", [rate(each.reaped_per_s) for each in inboxes], True),
        ScreenColumn("DELIVERED", [rate(each.delivered_per_s) for each in inboxes], True, extra=True),
        ScreenColumn("STATE", [_state(each) for each in inboxes]),
    ]


def _state(inbox: InboxLook) -> str:
    told = [
        "paused" if inbox.paused else "",
        f"{inbox.parked:,} parked" if inbox.parked else "",
        f"{inbox.failing:,} failing" if inbox.failing else "",
        "no worker" if inbox.unread else "",
        "late" if inbox.is_late else "",
    ]
    return ", ".join(filter(None, told))


def _keys(keys: Sequence[KeyLook], look: Look) -> list[ScreenColumn]:
    def when(key: KeyLook) -> str:
        if key.since is not None:
            return f"for {duration(max((look.at - key.since).total_seconds(), 0))}"
        left_s = 0.0 if key.retry_at is None else (key.retry_at - look.at).total_seconds()
        return f"again in {duration(left_s)}" if left_s > 0 else "due"

    return [
        ScreenColumn("INBOX", [each.inbox for each in keys]),
        ScreenColumn("KEY", [one_line(each.key) for each in keys]),
        ScreenColumn("STATE", [each.state for each in keys]),
        ScreenColumn("WHEN", [when(each) for each in keys]),
        ScreenColumn("ATTEMPTS", [f"{each.attempts:,}" for each in keys], True, extra=True),
    ]


def _batches(batches: Sequence[BatchLook]) -> list[ScreenColumn]:
    alive = {True: "alive", False: "DEAD", None: "?"}
    return [
        ScreenColumn("INBOX", [each.inbox for each in batches]),
        ScreenColumn("WORKER", [f"{one_line(each.host)} pid {each.pid}" for each in batches]),
        ScreenColumn("MESSAGES", [f"{each.messages:,}" for each in batches], True),
        ScreenColumn("IN HAND", [duration(max(each.in_hand_s, 0)) for each in batches], True),
        ScreenColumn("", [alive[each.alive] for each in batches]),
    ]


def _errors(errors: Sequence[ErrorLook]) -> list[ScreenColumn]:
    return [
        ScreenColumn("AT", [f"{each.at:%H:%M:%S}" for each in errors]),
        ScreenColumn("INBOX", [each.inbox for each in errors]),
        ScreenColumn("KEY", [one_line(each.key) for each in errors]),
        ScreenColumn("ERROR", [one_line(each.error_class or "?") for each in errors]),
        ScreenColumn("THEN", [f"{each.outcome} ({each.attempt})" for each in errors]),
        ScreenColumn("MESSAGE", [str(each.message_id) for each in errors], extra=True),
    ]


def _part(title: str, columns: Sequence[ScreenColumn], wrong: Sequence[bool], width: int) -> list[Text]:
    """Return the title, the headings and the rows; nothing if there are no rows."""
    rows = len(columns[0].cells)
    if not rows:
        return []
    shown = list(columns)
    while (widths := _fitted(shown, width)) is None and any(each.extra for each in shown):
        shown.remove(next(each for each in reversed(shown) if each.extra))
    widths = widths or [min(_whole(each), LEAST) for each in shown]
    lines = [Text(title, HEADING), Text(_line([each.heading for each in shown], shown, widths), FAINT)]
    for nth in range(rows):
        style = WRONG if nth < len(wrong) and wrong[nth] else ""
        lines.append(Text(_line([each.cells[nth] for each in shown], shown, widths), style))
    return lines


def _whole(column: ScreenColumn) -> int:
    return max(cell_len(cell) for cell in (column.heading, *column.cells))


def _fitted(columns: Sequence[ScreenColumn], width: int) -> list[int] | None:
    """Return widths that fit, the widest text narrowed first; None if there is too little room."""
    widths = [_whole(each) for each in columns]
    while sum(widths) + GAP * (len(columns) - 1) > width:
        wide = [nth for nth, each in enumerate(columns) if not each.is_number and widths[nth] > LEAST]
        if not wide:
            return None
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _line(cells: Sequence[str], columns: Sequence[ScreenColumn], widths: Sequence[int]) -> str:
    texts = []
    for cell, column, width in zip(cells, columns, widths, strict=True):
        text = Text(cell)
        text.truncate(width, overflow="ellipsis")
        gap = " " * (width - cell_len(text.plain))
        texts.append(gap + text.plain if column.is_number else text.plain + gap)
    return (" " * GAP).join(texts).rstrip()


def _cut(lines: list[Text], height: int) -> list[Text]:
    """Return that many of the lines; the last one tells how many are left out."""
    if len(lines) <= height:
        return lines
    return [*lines[: height - 1], Text(f"and {len(lines) - height + 1:,} more", FAINT)]


def rate(per_s: float | None) -> str:
    """Return a number of rows a second, `-/s` if it is not known yet."""
    if per_s is None:
        return "-/s"
    return f"{per_s:,.0f}/s" if per_s >= 10 or per_s == 0 else f"{per_s:.1f}/s"


def _wrapped(text: str, width: int) -> list[Text]:
    return list(Text(text).wrap(Console(width=width), width, overflow="fold"))
