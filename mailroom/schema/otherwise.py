"""What makes a thing leaves one that exists as it is: the same settings again are harmless, and others are refused."""

from collections.abc import Mapping

from mailroom.errors import ConfigurationError
from mailroom.schema.audit import differences


def check_same(
    what: str, before: Mapping[str, object], given: Mapping[str, object], changed_by: str, code: str
) -> None:
    """Raise `ConfigurationError` if `what` exists with another setting than is given; `changed_by` changes it."""
    if told := differences(before, given):
        raise ConfigurationError(
            f"{what} exists with other settings, and stays as it is: {told}. To change them: {changed_by}.", code=code
        )
