-- The outbox table of the layout `native`. Runs as it stands (mysql DATABASE < native.sql). What is between /*name*/ and
-- /**/ is what `outboxd init` puts in: the table's name, the type of the payload (json, longtext or longblob), and the
-- columns that --column renames. By hand, change it there. With --partition-by day it
-- also puts in, where `pk` and `partition_by` stand, a primary key with the timestamp and PARTITION BY RANGE COLUMNS: see partition.sql.
CREATE TABLE /*table*/ outbox /**/ (
    -- Becomes the header `id`, by which consumers recognise a repeated record.
    /*id*/ id /**/ CHAR(36) CHARACTER SET ascii NOT NULL DEFAULT (uuid()) /*pk*/ PRIMARY KEY /**/,
    -- The Kafka topic, unless --topic says otherwise.
    /*topic*/ topic /**/ VARCHAR(249),
    -- The record's key: rows of one key arrive in the order of their commits.
    /*key*/ partition_key /**/ VARCHAR(255),
    /*type*/ event_type /**/ VARCHAR(255),
    -- Null is delivered as the JSON literal null, or as a tombstone with --tombstone-on-null.
    /*payload*/ payload /**/ /*payload_type*/ JSON /**/,
    -- A JSON object whose members become headers.
    /*headers*/ headers /**/ JSON,
    -- The record's timestamp, in UTC.
    /*timestamp*/ created_at /**/ DATETIME(6) NOT NULL DEFAULT (utc_timestamp(6))/*pk_line*/ /**/
) CHARACTER SET utf8mb4/*partition_by*/ /**/;
