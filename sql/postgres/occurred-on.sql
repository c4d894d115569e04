-- The outbox table of the layout `occurred-on`. Runs as it stands (psql -f occurred-on.sql), after CREATE SCHEMA outbox.
-- What is between /*name*/ and /**/ is what `outboxd init` puts in: the table's name, the type of the payload (jsonb,
-- json, text or bytea), and the columns that --column renames. By hand, change it there. With --partition-by day it
-- also puts in, where `pk` and `partition_by` stand, a primary key with the timestamp and PARTITION BY RANGE: see partition.sql.
CREATE TABLE /*table*/ outbox.outbox_messages /**/ (
    -- These two become headers. The topic is outbox. and the type, unless --topic says otherwise.
    /*id*/ "Id" /**/ uuid /*pk*/ PRIMARY KEY /**/ DEFAULT /*id_default*/ gen_random_uuid() /**/,
    /*type*/ "Type" /**/ varchar(255) NOT NULL,
    /*payload*/ "Content" /**/ /*payload_type*/ jsonb /**/ NOT NULL,
    -- The record's timestamp.
    /*timestamp*/ "OccurredOnUtc" /**/ timestamptz NOT NULL DEFAULT now(),
    -- The rest is for whoever polls; the log needs none of it.
    "ProcessedOnUtc" timestamptz,
    "RetryCount" integer NOT NULL DEFAULT 0,
    "Error" text/*pk_line*/ /**/
)/*partition_by*/ /**/;
CREATE INDEX ON /*table*/ outbox.outbox_messages /**/ (/*timestamp*/ "OccurredOnUtc" /**/, /*id*/ "Id" /**/) WHERE "ProcessedOnUtc" IS NULL;
