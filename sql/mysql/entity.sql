-- The outbox table of the layout `entity`. Runs as it stands (mysql DATABASE < entity.sql). What is between /*name*/ and
-- /**/ is what `outboxd init` puts in: the table's name, the type of the payload (json, longtext or longblob), and the
-- columns that --column renames. By hand, change it there. With --partition-by day it
-- also puts in, where `pk` and `partition_by` stand, a primary key with the timestamp and PARTITION BY RANGE COLUMNS: see partition.sql.
CREATE TABLE /*table*/ outbox /**/ (
    -- These five become headers.
    /*id*/ event_id /**/ CHAR(36) CHARACTER SET ascii NOT NULL DEFAULT (uuid()) /*pk*/ PRIMARY KEY /**/,
    /*type*/ event_type /**/ VARCHAR(255) NOT NULL,
    entity_type VARCHAR(255) NOT NULL,
    entity_id VARCHAR(255) NOT NULL,
    /*version*/ entity_version /**/ INT NOT NULL DEFAULT 1,
    -- The Kafka topic, unless --topic says otherwise.
    /*topic*/ topic /**/ VARCHAR(249),
    -- The record's key: rows of one key arrive in the order of their commits.
    /*key*/ partition_key /**/ VARCHAR(255),
    /*payload*/ payload /**/ /*payload_type*/ JSON /**/,
    -- The rest is for whoever polls; the log needs none of it.
    status VARCHAR(20) NOT NULL DEFAULT 'pending',
    retry_count INT NOT NULL DEFAULT 0,
    max_retries INT NOT NULL DEFAULT 5,
    last_error TEXT,
    last_error_at DATETIME(6),
    -- The record's timestamp, in UTC.
    /*timestamp*/ created_at /**/ DATETIME(6) NOT NULL DEFAULT (utc_timestamp(6)),
    processing_started_at DATETIME(6),
    published_at DATETIME(6),
    locked_by VARCHAR(255),
    locked_until DATETIME(6),
    INDEX outboxd_pending (status, created_at, entity_version, event_id),
    INDEX outboxd_published (status, published_at),
    INDEX outboxd_lock (locked_until),
    INDEX outboxd_entity (entity_id, entity_version)/*pk_line*/ /**/
) CHARACTER SET utf8mb4/*partition_by*/ /**/;
