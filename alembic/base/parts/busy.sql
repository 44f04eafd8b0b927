-- A small table that is updated often: few rows per page, vacuumed early.
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500
