-- REMOVE in inbox/worker/in_flight.py
-- $1 id
UPDATE "mailroom".my_worker SET deleted = true WHERE id = $1::uuid
