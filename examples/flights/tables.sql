-- The business tables, made in the schema that search_path names.

CREATE TABLE flight (
    number      bigint PRIMARY KEY,
    designator  text NOT NULL,
    tail_number text,
    origin      text NOT NULL,
    destination text NOT NULL,
    hour        timestamptz NOT NULL
);
COMMENT ON TABLE flight IS 'The flights, written in the transactions that send them. Numbered in the order sent.';

-- Updated once per flight: room in the pages lets the new version lie beside the old one.
CREATE TABLE aircraft (
    tail_number text COLLATE "C" PRIMARY KEY,
    airport     text NOT NULL,
    flights     bigint NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE aircraft IS 'What the workers know of each aircraft: where its last flight went, and how many it made.';

-- No constraint keeps a flight from being here twice: the checks of the results must find out that none is.
CREATE TABLE ledger (
    nth        bigint GENERATED ALWAYS AS IDENTITY,
    flight     bigint NOT NULL,
    key        text COLLATE "C" NOT NULL,
    clock      bigint NOT NULL,
    worker     integer NOT NULL,
    sent_at    timestamptz NOT NULL,
    handled_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE ledger IS 'One row per message handled, written in the transaction that reaps it.';
COMMENT ON COLUMN ledger.nth IS 'Order of handling. Drawn while the key is held, so it rises along each key.';
COMMENT ON COLUMN ledger.worker IS 'Process id of the worker.';
