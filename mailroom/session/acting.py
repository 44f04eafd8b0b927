"""As which role a session looks at others and ends them.

The server shows when a session began, and lets it be ended, to whoever has the rights of the role that it *logged in*
as. `ALTER ROLE app SET role = owner` makes `owner` the current role of all sessions of `app`, and `owner` need not have
the rights of `app`: then such a session may not even look at itself. So what reads or ends sessions does it as the role
of the login first. That asks for no right, and takes no statement more.
"""

# Makes the role of the login the current one until the transaction ends; a lone statement is one. Have what is to be
# read depend on `acting.role`, or it may be read before.
LOGIN = "(SELECT set_config('role', 'none', true)) AS acting (role)"
CURRENT = "(SELECT current_setting('role')) AS acting (role)"


def if_acting(value: str) -> str:
    """Return SQL for `value` that is evaluated only as the acting role."""
    return f"CASE WHEN acting.role IS NOT NULL THEN {value} END"
