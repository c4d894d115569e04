-- The outbox table of the layout `native`. Runs as it stands (psql -f native.sql). What is between /*name*/ and /**/ is
-- what `outboxd init` puts in: the table's name, the type of the payload (jsonb, json, text or bytea), the default of the
-- id (uuidv7() from PostgreSQL 18 on), and the columns that --column renames. By hand, change it there. With --partition-by day it
-- also puts in, where `pk` and `partition_by` stand, a primary key with the timestamp and PARTITION BY RANGE: see partition.sql.
CREATE TABLE /*table*/ outbox /**/ (
    -- Becomes the header `id`, by which consumers recognise a repeated record.
    /*id*/ id /**/ uuid /*pk*/ PRIMARY KEY /**/ DEFAULT /*id_default*/ gen_random_uuid() /**/,
    -- The Kafka topic, unless --topic says otherwise.
    /*topic*/ topic /**/ text,
    -- The record's key: rows of one key arrive in the order of their commits.
    /*key*/ partition_key /**/ text,
    /*type*/ event_type /**/ text,
    -- Null is delivered as the JSON literal null, or as a tombstone with --tombstone-on-null.
    /*payload*/ payload /**/ /*payload_type*/ jsonb /**/,
    -- A JSON object whose members become headers.
    /*headers*/ headers /**/ jsonb,
    -- The record's timestamp.
    /*timestamp*/ created_at /**/ timestamptz NOT NULL DEFAULT now()/*pk_line*/ /**/
)/*partition_by*/ /**/;
