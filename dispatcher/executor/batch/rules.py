"""The rules of executables, checked again when they are taken: rows may have bypassed the trigger that checks them.

A superuser's COPY with the trigger disabled bypasses it, or a session with `session_replication_role = replica`. The
rules are those of the trigger function `check_executable`, without `new.`; a test compares them. So is what
`check_executable_clock` checks: an answer could not be sent.
"""

import re

# Of another version of the format only the columns are known.
# D-execute-6: The rules are checked again when an executable is taken.
RULES = {
    "operation": """CASE WHEN version <> 1 THEN true ELSE CASE operation
        WHEN 'put'          THEN key <> '' AND value IS NOT NULL AND num_nonnulls(
                                 end_key, amount, bytes, arguments, at, row_limit) = 0
        WHEN 'increment'    THEN key <> '' AND amount IS NOT NULL AND num_nonnulls(
                                 end_key, value, bytes, expected, arguments, at,
                                 row_limit) = 0
        WHEN 'delete'       THEN key <> '' AND num_nonnulls(
                                 end_key, value, amount, bytes, expected, arguments, at,
                                 row_limit) = 0
        WHEN 'delete_range' THEN num_nonnulls(
                                 value, amount, bytes, expected, arguments, at) = 0
        WHEN 'account'      THEN key <> '' AND num_nonnulls(amount, bytes) = 2
                                 AND target = 'accounting' AND num_nonnulls(
                                 end_key, value, expected, arguments, row_limit) = 0
        WHEN 'call'         THEN num_nonnulls(
                                 end_key, value, amount, bytes, expected, at,
                                 row_limit) = 0
        ELSE false END END""",
    "length": "octet_length(operation) <= 41",
    "target": "target ~ '^[a-z][a-z0-9_]*$' AND octet_length(target) <= 41",
    "key": "octet_length(key) <= 1024",
    "levels": "operation <> 'account' OR key !~ '^(?:[^/]*/){32}'",
    "end_key": "octet_length(end_key) BETWEEN 1 AND 1024",
    "value": "octet_length(value) <= 4194304",
    "expected": "octet_length(expected) <= 4194304",
    "arguments": "octet_length(arguments::text) <= 4194304",
    "at": "at >= '0001-01-01 UTC' AND at < '9999-01-01 UTC'",
    "row_limit": "row_limit >= 1",
    "notify": "notify ~ '^[A-Za-z][A-Za-z0-9_.-]*$' AND octet_length(notify) <= 200",
    "headers": "jsonb_typeof(headers) = 'object' AND octet_length(headers::text) <= 8192 "
    """AND NOT jsonb_path_exists(headers, 'strict $.* ? (@.type() <> "string")')""",
    "after_clock": "after_clock BETWEEN 0 AND 4611686018427387904",
    "source": "octet_length(source) <= 200",
    "sent_at": "sent_at >= '0001-01-01 UTC' AND sent_at < '9999-01-01 UTC'",
}
# The name of a rule that the row breaks, else null. As in a CHECK, a rule that is null holds. The two functions get
# their schema, since a user's overload could match the arguments better.
BROKEN = "\n".join(f"WHEN NOT ({rule}) THEN '{name}'" for name, rule in RULES.items())
TOO_FAR = "WHEN after_clock > 4294967296 AND after_clock > {schema}.clock_reach() THEN 'after_clock'"
FAULT = re.sub(r"\b(num_nonnulls|jsonb_path_exists)\(", r"pg_catalog.\1(", f"CASE {BROKEN}\n{TOO_FAR} END")
