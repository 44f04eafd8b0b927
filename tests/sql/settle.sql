-- SETTLE in inbox/handling/batch.py
SET CONSTRAINTS ALL IMMEDIATE
