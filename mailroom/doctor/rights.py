"""Rights: too many of PUBLIC's, too few of the roles that work, and rows that policies hide."""

from mailroom.doctor.finding import FOUND, DoctorCheck, asking
from mailroom.figures.alive import ALIVE, DATABASE
from mailroom.figures.leaders import WITH_SESSIONS
from mailroom.sql import locks
from mailroom.sql.operation import Sql

# What a migration grants itself shows no role more than what is its own.
PUBLIC_TABLES = Sql(
    """
SELECT c.oid::regclass::text, pg_catalog.format('%%s: %%s', c.oid::regclass, string_agg(x.privilege_type, ', '::text))
FROM pg_class AS c, LATERAL aclexplode(c.relacl) AS x
WHERE c.relnamespace = '{schema}'::regnamespace AND x.grantee = 0::oid
  AND NOT (c.relname = 'my_due' AND x.privilege_type = 'SELECT')
GROUP BY c.oid ORDER BY 1
""",
    columns=FOUND,
)
PUBLIC_SCHEMA = Sql(
    """
SELECT n.oid::regnamespace::text, pg_catalog.format('everybody may create objects in schema %%s', n.oid::regnamespace)
FROM pg_namespace AS n, LATERAL aclexplode(n.nspacl) AS x
WHERE n.oid = '{schema}'::regnamespace AND x.grantee = 0::oid AND x.privilege_type = 'CREATE'
""",
    columns=FOUND,
)
# The logins of leaders and of workers with a batch.
WORKING = f"""{ALIVE},
working AS MATERIALIZED (
    SELECT a.usesysid AS oid, l.role AS does, NULL::text AS inbox
    FROM {WITH_SESSIONS}
    UNION
    SELECT a.usesysid, 'worker', w.inbox
    FROM {{schema}}.worker AS w JOIN alive ON alive.number = w.process_number::bigint & 4294967295
    JOIN pg_stat_activity AS a ON a.pid = alive.pid)"""
# A login may work as each role that it is a member of. Where a grant gives a column only, that one is asked for. The
# dispatcher's housekeeping needs each inbox by its name, new ones too.
TOO_FEW = Sql(
    """
WITH {working},
needed (does, relation, privilege, of_column) AS (VALUES
    ('dispatcher', 'outbox', 'SELECT', NULL), ('dispatcher', 'outbox', 'DELETE', NULL),
    ('dispatcher', 'dispatch_turn', 'UPDATE', NULL), ('dispatcher', 'inbox', 'INSERT', NULL),
    ('dispatcher', 'lease', 'UPDATE', NULL), ('dispatcher', 'node', 'UPDATE', 'clock_ceiling'),
    ('executor', 'outbox_executable', 'SELECT', NULL), ('executor', 'outbox_executable', 'DELETE', NULL),
    ('executor', 'lease', 'UPDATE', NULL), ('worker', 'inbox_', 'SELECT', NULL), ('worker', 'inbox_', 'DELETE', NULL),
    ('housekeeping', 'inbox_', 'SELECT', NULL), ('housekeeping', 'inbox_', 'DELETE', NULL))
SELECT pg_catalog.format('GRANT %%s ON {schema}.%%s TO %%I;', p.wanted, n.relation || w.inbox, r.rolname),
       pg_catalog.format('role %%s, %%s, lacks %%s on %%s', r.rolname, w.does, p.wanted, c.oid::regclass)
FROM (SELECT w.oid, w.does, coalesce(w.inbox, '') AS inbox FROM working AS w
      UNION ALL
      SELECT w.oid, 'housekeeping', i.name FROM working AS w, {schema}.inbox_registry AS i WHERE w.does = 'dispatcher'
     ) AS w
JOIN needed AS n ON n.does = w.does JOIN pg_roles AS r ON r.oid = w.oid
JOIN pg_class AS c ON c.relnamespace = '{schema}'::regnamespace AND c.relname = (n.relation || w.inbox)::name
CROSS JOIN LATERAL (SELECT n.privilege || coalesce(' (' || n.of_column || ')', '') AS wanted) AS p
WHERE NOT (n.of_column IS NULL AND has_table_privilege(w.oid, c.oid, n.privilege))
  AND NOT EXISTS (SELECT FROM pg_roles AS g WHERE pg_has_role(w.oid, g.oid, 'MEMBER') AND CASE
    WHEN n.of_column IS NULL THEN has_table_privilege(g.oid, c.oid, n.privilege)
    ELSE has_column_privilege(g.oid, c.oid, n.of_column, n.privilege) END)
ORDER BY 2
""",
    columns=FOUND,
    working=WORKING,
    alive_lock=locks.ALIVE,
    database=DATABASE,
)
# Policies on the tables of a link are for the roles of its reader. So only those count that bind who works here or who
# asks, if that one may read the table at all.
HIDDEN = Sql(
    """
WITH {working}
SELECT c.oid::regclass::text, pg_catalog.format('%%s from %%s', c.oid::regclass, string_agg(DISTINCT r.rolname::text,
    ', '::text))
FROM pg_class AS c JOIN pg_roles AS r ON r.oid IN (SELECT w.oid FROM working AS w)
     OR r.rolname = current_user AND has_table_privilege(c.oid, 'SELECT')
WHERE c.relnamespace = '{schema}'::regnamespace AND c.relrowsecurity AND NOT r.rolsuper AND NOT r.rolbypassrls
  AND (c.relforcerowsecurity OR NOT pg_has_role(r.oid, c.relowner, 'USAGE'))
GROUP BY c.oid ORDER BY 1
""",
    columns=FOUND,
    working=WORKING,
    alive_lock=locks.ALIVE,
    database=DATABASE,
)
# All that is made later belongs to whom the node does; what an earlier release made may not.
STRANGE = Sql(
    """
SELECT pg_catalog.format('ALTER TABLE %%s OWNER TO %%I;', c.oid::regclass, o.rolname),
       pg_catalog.format('%%s belongs to role %%s, and the node to role %%s', c.oid::regclass, r.rolname, o.rolname)
FROM pg_class AS n JOIN pg_class AS c ON c.relnamespace = n.relnamespace AND c.relowner <> n.relowner
JOIN pg_roles AS o ON o.oid = n.relowner JOIN pg_roles AS r ON r.oid = c.relowner
WHERE n.oid = '{schema}.node'::regclass::oid AND c.relkind = 'r' AND c.relispartition ORDER BY 2
""",
    columns=FOUND,
)
# As at the start of a dispatcher: a node without links is at home wherever it is.
COPY = Sql(
    """
SELECT '', pg_catalog.format('the node was at server %%s, database %%s; it is at server %%s, database %%s', n.system_id,
                  n.database_oid, c.system_identifier, d.oid)
FROM {schema}.node AS n, pg_control_system() AS c, pg_database AS d
WHERE d.datname = current_database() AND n.system_id <> 0
  AND (n.system_id, n.database_oid) <> (c.system_identifier, d.oid::bigint)
  AND (EXISTS (SELECT FROM {schema}.link) OR EXISTS (SELECT FROM {schema}.origin))
""",
    columns=FOUND,
)

CHECKS = (
    DoctorCheck("M035", asking(PUBLIC_TABLES), "REVOKE ALL ON {all} FROM PUBLIC;"),
    DoctorCheck("M036", asking(PUBLIC_SCHEMA), "REVOKE CREATE ON SCHEMA {first} FROM PUBLIC;"),
    DoctorCheck("M037", asking(TOO_FEW), "{first}", of_tables=True),
    DoctorCheck("M038", asking(HIDDEN), "ALTER TABLE {first} DISABLE ROW LEVEL SECURITY;", of_tables=True),
    DoctorCheck("M049", asking(STRANGE), "{first}"),
    DoctorCheck("M039", asking(COPY), "mailroom node new-id --schema {schema}", of_tables=True),
)
