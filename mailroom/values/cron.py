"""Cron: the times that an expression names in a time zone, as instants.

The library parses the expression and counts in wall times, without a zone; what a wall time means where clocks are set
forward or back is decided here, in one place. By the rule of Debian's cron an expression is of fixed times, or it is
an interval, if its minutes or its hours begin with `*`. A fixed time comes once on each of its days: where the clock
is set back, the first time that it shows it; where it is set forward over it, at the end of that gap. An interval goes
by the time that passes: what the clock shows twice comes twice, and what it never shows does not come.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from mailroom.errors import InvalidMessage
from mailroom.values.names import shown

NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
FIELDS = 5
MAX_LENGTH = 200
MAX_ZONE_LENGTH = 100
SECOND = timedelta(seconds=1)


class Cron:
    """The times of a cron expression in a time zone. Raises `InvalidMessage` for one that is not valid.

    The expression has five fields, or is one of `NAMED`; `zone` is a name of the IANA's, such as Europe/Paris.
    """

    def __init__(self, expression: str, zone: str) -> None:
        self.zone = _zone(zone)
        self._fields = _fields(expression)
        minutes, hours, *_ = self._fields.split()
        self._is_fixed = not minutes.startswith("*") and not hours.startswith("*")
        try:
            first = next(iter(self._walls(datetime(2000, 1, 1))), None)  # noqa: DTZ001  # a wall time
        except CronSimError as error:
            raise _refused(expression, str(error)) from None
        if first is None:
            raise _refused(expression, "it names a day that no year has")

    def after(self, moment: datetime) -> datetime:
        """Return the first of the times that is later than `moment`, in UTC: elsewhere sums of times are wall times."""
        moment = moment.astimezone(UTC)
        local = moment.astimezone(self.zone)
        wall = local.replace(tzinfo=None, fold=0)
        # Wall times up to this long before are shown once more, if the clock is set back after `moment`.
        repeated = max(_offset(wall, 0, self.zone) - _offset(wall, 1, self.zone), timedelta())
        found = None
        for each in self._walls(wall - repeated):
            for instant in self._instants(each):
                if instant > moment and (found is None or instant < found):
                    found = instant
            # Those that are shown once more come in the order of their second time only after all others.
            if found is not None and each > wall:
                break
        if found is None:
            raise InvalidMessage("The cron expression has no further time.", code="MR-invalid-cron")
        return found

    def latest(self, first: datetime, until: datetime) -> datetime:
        """Return the last of the times up to `until`; `first` is one of them, and is returned if it is the last.

        By halving, since there may be millions in between.
        """
        low, high = first.astimezone(UTC), until.astimezone(UTC)
        while high - low >= SECOND:
            middle = low + (high - low) / 2
            found = self.after(middle)
            if found <= until:
                low = found
            else:
                high = middle
        return low

    def _walls(self, wall: datetime) -> Iterator[datetime]:
        """Yield the wall times after `wall`."""
        return CronSim(self._fields, wall)

    def _instants(self, wall: datetime) -> list[datetime]:
        """Return when the wall time comes, in UTC."""
        first, second = (wall.replace(tzinfo=self.zone, fold=fold).astimezone(UTC) for fold in (0, 1))
        if second < first:  # never shown: with the offset after the gap it is before it, and the other way round
            return [self._end_of_gap(second, first)] if self._is_fixed else []
        return [first] if self._is_fixed or first == second else [first, second]

    def _end_of_gap(self, before: datetime, behind: datetime) -> datetime:
        """Return when the clock is set forward, which is between the two."""
        offset = before.astimezone(self.zone).utcoffset()
        while behind - before > SECOND:
            middle = (before + (behind - before) / 2).replace(microsecond=0)
            if middle.astimezone(self.zone).utcoffset() == offset:
                before = middle
            else:
                behind = middle
        return behind


# D-daemon-5: Cron counts in wall times, and one place decides what these mean.
@lru_cache(maxsize=1024)
def cron(expression: str, zone: str) -> Cron:
    """Return the times of an expression, parsed once. Raises `InvalidMessage`."""
    return Cron(expression, zone)


def _offset(wall: datetime, fold: int, zone: ZoneInfo) -> timedelta:
    return wall.replace(tzinfo=zone, fold=fold).utcoffset() or timedelta()


def _fields(expression: str) -> str:
    if not isinstance(expression, str) or len(expression) > MAX_LENGTH:
        raise _refused(expression, f"it is not a text of at most {MAX_LENGTH} characters")
    fields = NAMED.get(expression.strip(), expression).split()
    if len(fields) != FIELDS:
        raise _refused(expression, f"it has {len(fields)} fields")
    return " ".join(fields)


def _refused(expression: object, why: str) -> InvalidMessage:
    return InvalidMessage(
        f"Cron expression {shown(expression)} is not valid: {why}. Give five fields (minute, hour, day of the month, "
        f"month, day of the week), such as '30 7 * * mon-fri', or one of {', '.join(NAMED)}.",
        code="MR-invalid-cron",
    )


def _zone(name: str) -> ZoneInfo:
    unknown = InvalidMessage(
        f"Time zone {shown(name)} is not known: give a name of the IANA's, such as Europe/Paris or UTC.",
        code="MR-invalid-time-zone",
    )
    if not isinstance(name, str) or len(name) > MAX_ZONE_LENGTH:
        raise unknown
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):  # no name, a directory of names, none of the known ones
        raise unknown from None
