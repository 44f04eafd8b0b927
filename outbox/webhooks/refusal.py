"""What a request is answered with that became no message."""

from mailroom.errors import MailroomError

RETRY_AFTER_S = 5  # what a sender is told that should try again


class RequestRefused(MailroomError):
    """A request that is refused, with the status of the answer and headers of its own."""

    def __init__(self, status: int, text: str, *, code: str, **headers: str) -> None:
        super().__init__(text, code=code)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def unreadable(text: str) -> RequestRefused:
    """Return the refusal of a request that cannot be read."""
    return RequestRefused(400, text, code="MR-webhook-request-invalid")


def unavailable(status: int = 503) -> RequestRefused:
    """Return the refusal where the request is right and the message cannot be sent now. It says no more than that."""
    return RequestRefused(
        status,
        "The message cannot be taken at the moment. Send it again after a while, with the same id.",
        code="MR-webhook-unavailable",
        retry_after=str(RETRY_AFTER_S),
    )
