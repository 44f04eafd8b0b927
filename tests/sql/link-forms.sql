-- FORMS in dispatcher/links/refusal.py
SELECT set_config('datestyle', 'ISO', true), set_config('timezone', 'UTC', true), set_config('bytea_output', 'hex', true), set_config('array_nulls', 'on', true)
