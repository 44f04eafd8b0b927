-- What a downgrade of the base does, once nothing holds it up.

DO $$
DECLARE staged text;
BEGIN
    FOR staged IN SELECT format('%I.%I', coalesce(schema, current_schema()),
                                concat('staging_', replace(token::text, '-', ''))) FROM spark_staging LOOP
        EXECUTE concat('DROP TABLE IF EXISTS ', staged);
    END LOOP;
END $$;
DROP VIEW outbox_jdbc, my_worker, my_key_state, my_due, my_attempt, my_parked, my_reaped, my_limit, my_slot, my_breaker,
    my_spark_stream, my_stat_minute, statistics;
-- The triggers of watched tables go with it.
DROP FUNCTION watch CASCADE;
DROP FUNCTION clock_reach, link_allows, link_next, watch_query, watch_told, watch_rest, watch_json,
    watch_audit;
DROP TABLE node, commit_token, outbox, periodic, scheduled, dispatch_turn, execute_turn, lease, subscription, fan_out, fan_out_way,
    inbox, inbox_registry, limits, slot, breaker, stable, worker, key_state, attempt, parked, reaped, reaped_day, dead_letter, audit,
    log, log_registry, log_segment, log_tick, log_topic, log_lane, log_receipt,
    outbox_executable, store,
    accounting, executable_target, executable_function, executable_cursor, link, link_allowed, link_topic, transit, origin,
    receipt, known, spark_batch, spark_staging, spark_bulk, spark_stream, spark_drain, outbox_jdbc_id,
    stat_minute, bridge_out, bridge_known, bridge_parts, bridge_last, bridge_done, bridge_in, bridge_position, bridge_mark;
DROP SEQUENCE clock;
DROP FUNCTION doorbell, check_message, refuse_without_node, take_dispatch_turn, take_execute_turn, refuse_commit, hold_batch, orphaned_keys,
    failing_keys, check_executable, check_executable_clock, link_topic_asked, acknowledged_less, greeted, bound_reader,
    link_hold, link_hello, link_ask, link_acknowledge, link_want, link_claim, link_match, outbox_jdbc_take, outbox_jdbc_copy, cbor_to_jsonb, sequences_behind,
    raise_sequence, raise_sequences, clock_of_rows, raise_copied, is_mine, delete_marked, refuse_others, make_reaped_days,
    empty_reaped_day, drop_reaped_day, lane_of, make_log_segment, lock_log_segment, empty_log_segment,
    drop_log_segment, age_percentile;
