-- The table of the layout `event-store`: events that are only ever added. Runs as it stands (psql -f event-store.sql). What
-- is between /*name*/ and /**/ is what `outboxd init` puts in: the table's name, the type of the payload (jsonb, json, text
-- or bytea), and the columns that --column renames. By hand, change it there. With --partition-by day it
-- also puts in, where `pk` and `partition_by` stand, a primary key with the timestamp and PARTITION BY RANGE: see partition.sql.
CREATE TABLE /*table*/ events /**/ (
    -- Position, type and every tag become headers.
    /*id*/ position /**/ bigserial /*pk*/ PRIMARY KEY /**/,
    transaction_id xid8 NOT NULL DEFAULT pg_current_xact_id(),
    /*type*/ type /**/ text NOT NULL,
    -- "key=value". Publishers select by them; the first required one's value is the record's key.
    /*tags*/ tags /**/ text[] NOT NULL DEFAULT '{}',
    /*payload*/ data /**/ /*payload_type*/ jsonb /**/ NOT NULL,
    -- The record's timestamp.
    /*timestamp*/ occurred_at /**/ timestamptz NOT NULL DEFAULT now()/*pk_line*/ /**/
)/*partition_by*/ /**/;
-- The order in which they are polled.
CREATE INDEX ON /*table*/ events /**/ (transaction_id, /*id*/ position /**/);
