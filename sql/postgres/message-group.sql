-- The outbox tables of the layout `message-group`. Runs as it stands (psql -f message-group.sql) for the first of its
-- two tables, which look alike. What is between /*name*/ and /**/ is what `outboxd init` puts in: the table's name, and
-- the columns that --column renames. By hand, change it there. With --partition-by day it
-- also puts in, where `pk` and `partition_by` stand, a primary key with the timestamp and PARTITION BY RANGE: see partition.sql.
CREATE TABLE /*table*/ outbox_events /**/ (
    -- Becomes a header. A TSID: 13 characters of Crockford's base32.
    /*id*/ id /**/ varchar(13) /*pk*/ PRIMARY KEY /**/,
    -- EVENT or DISPATCH_JOB. An HTTP sink has a path for each.
    /*type*/ type /**/ varchar(20) NOT NULL,
    -- The record's key: rows of one group arrive in the order of their commits.
    /*key*/ message_group /**/ varchar(255),
    /*payload*/ payload /**/ text NOT NULL,
    -- The rest is for whoever polls; the log needs none of it.
    status varchar(20) NOT NULL DEFAULT 'PENDING' CHECK (status IN ('PENDING', 'PROCESSING', 'COMPLETED', 'FAILED')),
    retry_count integer NOT NULL DEFAULT 0,
    -- The record's timestamp.
    /*timestamp*/ created_at /**/ timestamptz NOT NULL DEFAULT now(),
    processed_at timestamptz,
    error_message text/*pk_line*/ /**/
)/*partition_by*/ /**/;
CREATE INDEX ON /*table*/ outbox_events /**/ (status, /*key*/ message_group /**/, /*timestamp*/ created_at /**/, /*id*/ id /**/);
