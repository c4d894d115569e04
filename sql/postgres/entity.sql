-- The outbox table of the layout `entity`. Runs as it stands (psql -f entity.sql). What is between /*name*/ and /**/ is
-- what `outboxd init` puts in: the table's name, the type of the payload (jsonb, json, text or bytea), and the columns
-- that --column renames. By hand, change it there. With --partition-by day it
-- also puts in, where `pk` and `partition_by` stand, a primary key with the timestamp and PARTITION BY RANGE: see partition.sql.
CREATE TABLE /*table*/ outbox /**/ (
    -- These five become headers.
    /*id*/ event_id /**/ uuid /*pk*/ PRIMARY KEY /**/ DEFAULT /*id_default*/ gen_random_uuid() /**/,
    /*type*/ event_type /**/ text NOT NULL,
    entity_type text NOT NULL,
    entity_id text NOT NULL,
    /*version*/ entity_version /**/ integer NOT NULL DEFAULT 1,
    -- The Kafka topic, unless --topic says otherwise.
    /*topic*/ topic /**/ text,
    -- The record's key: rows of one key arrive in the order of their commits.
    /*key*/ partition_key /**/ text,
    /*payload*/ payload /**/ /*payload_type*/ jsonb /**/,
    -- The rest is for whoever polls; the log needs none of it.
    status text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'processing', 'published', 'failed')),
    retry_count integer NOT NULL DEFAULT 0,
    max_retries integer NOT NULL DEFAULT 5,
    last_error text,
    last_error_at timestamptz,
    -- The record's timestamp.
    /*timestamp*/ created_at /**/ timestamptz NOT NULL DEFAULT now(),
    processing_started_at timestamptz,
    published_at timestamptz,
    locked_by text,
    locked_until timestamptz/*pk_line*/ /**/
)/*partition_by*/ /**/;
CREATE INDEX ON /*table*/ outbox /**/ (status, /*timestamp*/ created_at /**/, /*version*/ entity_version /**/, /*id*/ event_id /**/);
CREATE INDEX ON /*table*/ outbox /**/ (status, published_at);
CREATE INDEX ON /*table*/ outbox /**/ (locked_until);
CREATE INDEX ON /*table*/ outbox /**/ (entity_id, /*version*/ entity_version /**/);
