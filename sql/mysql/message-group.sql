-- The outbox tables of the layout `message-group`. Runs as it stands (mysql DATABASE < message-group.sql) for the first
-- of its two tables, which look alike. What is between /*name*/ and /**/ is what `outboxd init` puts in: the table's
-- name, and the columns that --column renames. By hand, change it there. With --partition-by day it
-- also puts in, where `pk` and `partition_by` stand, a primary key with the timestamp and PARTITION BY RANGE COLUMNS: see partition.sql.
CREATE TABLE /*table*/ outbox_events /**/ (
    -- Becomes a header. A TSID: 13 characters of Crockford's base32.
    /*id*/ id /**/ VARCHAR(13) CHARACTER SET ascii NOT NULL /*pk*/ PRIMARY KEY /**/,
    -- EVENT or DISPATCH_JOB. An HTTP sink has a path for each.
    /*type*/ type /**/ VARCHAR(20) NOT NULL,
    -- The record's key: rows of one group arrive in the order of their commits.
    /*key*/ message_group /**/ VARCHAR(255),
    /*payload*/ payload /**/ LONGTEXT NOT NULL,
    -- The rest is for whoever polls; the log needs none of it.
    status VARCHAR(20) NOT NULL DEFAULT 'PENDING',
    retry_count INT NOT NULL DEFAULT 0,
    -- The record's timestamp, in UTC.
    /*timestamp*/ created_at /**/ DATETIME(6) NOT NULL DEFAULT (utc_timestamp(6)),
    processed_at DATETIME(6),
    error_message TEXT,
    INDEX outboxd_pending (status, /*key*/ message_group /**/, /*timestamp*/ created_at /**/)/*pk_line*/ /**/
) CHARACTER SET utf8mb4/*partition_by*/ /**/;
