import os, psycopg, pytest
from psycopg.conninfo import conninfo_to_dict
from tests.roles import processes
from tests.roles.test_processes import PROCESSES, EVERY
from tests.support.roles import role, rights
from mailroom.roles.statements import *
P=os.environ["ABL"]
def test_ablate(busy, monkeypatch):
    if P.startswith("reaper"):
        inbox=P.split(":")[1]; purpose="reaper"; inboxes=(inbox,)
        runs=lambda n,d: processes.reaps(n,d,monkeypatch,inbox)
    else:
        purpose=P; runs,inboxes=PROCESSES[P]
    atoms=set(fixed_atoms(purpose))
    for i in inboxes: atoms|=inbox_atoms(purpose,GrantedInbox(i,i=="ledger"))
    atoms={a for a in atoms if not covered(a, frozenset(atoms-{a}))}
    c=busy.connection
    import tests.support.waiting as w
    out=[]
    with role(busy.dsn, *rights(purpose,*inboxes,total=["ledger"])) as (name,dsn):
        for a in sorted(atoms, key=str):
            c.execute(revokes("mailroom",name,[a])[0])
            try:
                processes_run(c, busy, runs, dsn)
                out.append(str(a))
            except BaseException as e:
                t=repr(e)[:150]
                if "denied" not in t and "Privilege" not in t: print("OTHER", a, t)
            finally:
                for g in grants("mailroom",name,atoms): c.execute(g)
                reset(busy)
    print("NOTNEEDED", P, "\n".join(out))
SNAP={}
def processes_run(c,busy,runs,dsn):
    import signal
    runs(busy,dsn)
TABLES="outbox scheduled fan_out fan_out_way inbox stable worker key_state attempt parked dead_letter audit outbox_executable store accounting executable_cursor transit receipt known spark_batch commit_token outbox_jdbc_id lease link link_topic origin subscription inbox_registry node".split()
def reset(busy):
    c=busy.connection
    busy.end_sessions("mailroom")
    if not SNAP:
        return
    for t in SNAP: c.execute(f"DELETE FROM mailroom.{t}")
    for t in SNAP: c.execute(f"INSERT INTO mailroom.{t} OVERRIDING SYSTEM VALUE SELECT * FROM snap.{t}") if not GEN.get(t) else c.execute(f"INSERT INTO mailroom.{t} ({GEN[t]}) OVERRIDING SYSTEM VALUE SELECT {GEN[t]} FROM snap.{t}")
GEN={}
@pytest.fixture(autouse=True)
def snap(busy):
    c=busy.connection
    c.execute("CREATE SCHEMA snap")
    for t in TABLES:
        c.execute(f"CREATE TABLE snap.{t} AS TABLE mailroom.{t}"); SNAP[t]=1
        cols=[n for (n,) in c.execute(f"SELECT attname FROM pg_attribute WHERE attrelid='mailroom.{t}'::regclass AND attnum>0 AND attgenerated='' AND NOT attisdropped").fetchall()]
        GEN[t]=", ".join('"%s"'%x for x in cols)
    monkey=None
    yield
@pytest.fixture(autouse=True)
def quick(monkeypatch):
    import tests.support.waiting as w
    monkeypatch.setattr(w, "WITHIN_S", 3.0)
