-- The columns that polling needs beside those of the layout `native`, for a table that has those already. Runs as it stands
-- (mysql < native-status.sql). What is between /*name*/ and /**/ is what `outboxd init` puts in. Every row that is in the
-- table becomes pending: set the status of those that were delivered before the poller starts.
ALTER TABLE /*table*/ outbox /**/
    -- The order of rows. (A table with partitions cannot have a unique key without the timestamp: there it is a plain index.)
    ADD COLUMN seq BIGINT NOT NULL AUTO_INCREMENT /*seq_key*/ UNIQUE /**/,
    ADD COLUMN status VARCHAR(20) CHARACTER SET ascii NOT NULL DEFAULT 'pending',
    ADD COLUMN attempts INT NOT NULL DEFAULT 0,
    ADD COLUMN next_attempt_at DATETIME(6),
    ADD COLUMN locked_by VARCHAR(255),
    ADD COLUMN locked_until DATETIME(6),
    ADD COLUMN last_error TEXT,
    ADD COLUMN published_at DATETIME(6),
    ADD INDEX outboxd_pending (status, seq),
    ADD INDEX outboxd_waiting (next_attempt_at);
