-- REMOVE in inbox/worker/in_flight.py
-- $1 id
DELETE FROM "mailroom".my_worker WHERE id = $1::uuid
