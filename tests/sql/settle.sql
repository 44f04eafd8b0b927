-- SETTLE in inbox/worker/batch.py
SET CONSTRAINTS ALL IMMEDIATE
