-- Free space in each page, so that updates of a busy counter do not touch the index (HOT).
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
