"""The role as which a session looks at others and ends them.

A role may see when a session began, and end it, if it has the rights of the role that the session *logged in* as.
`ALTER ROLE app SET role = owner` makes `owner` the current role of all sessions of `app`, and `owner` need not have the
rights of `app`: then such a session may not even look at itself. So statements that read or end sessions first switch
to the role of the login. That needs no right and no extra statement.
"""

# Makes the role of the login the current one until the transaction ends; a lone statement is one. Have what is to be
# read depend on `acting.role`, or it may be read before.
LOGIN = "(SELECT set_config('role', 'none', true)) AS acting (role)"
CURRENT = "(SELECT current_setting('role')) AS acting (role)"


def if_acting(value: str) -> str:
    """Return SQL for `value` that is evaluated only as the acting role."""
    return f"CASE WHEN acting.role IS NOT NULL THEN {value} END"
