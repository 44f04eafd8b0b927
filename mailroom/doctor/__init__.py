"""The doctor: what is wrong with a node now, as its server's catalogs show it, and the command that helps."""

from mailroom.doctor.examining import examine, examine_async
from mailroom.doctor.finding import Finding, Limits

__all__ = ["Finding", "Limits", "examine", "examine_async"]
