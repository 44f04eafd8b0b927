"""Report failures of handlers to Sentry: `Worker(..., on_error=report)`, once `sentry_sdk.init` has been called.

Give `init` `include_local_variables=False`: the local variables of a handler hold what is in messages.
"""

import sentry_sdk

from inbox import Message


def report(message: Message | None, error: Exception) -> None:
    """Report a failure, with what finds the message again. Without it, it is not known which of a batch failed."""
    with sentry_sdk.new_scope() as scope:
        if message is not None:
            scope.set_tag("topic", message.topic)
            scope.set_context("message", {"id": str(message.id), "key": message.key, "clock": message.clock})
        sentry_sdk.capture_exception(error)
