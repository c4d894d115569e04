-- The outbox table of the layout `produce-receive`. Runs as it stands (mysql DATABASE < produce-receive.sql). What is
-- between /*name*/ and /**/ is what `outboxd init` puts in: the table's name, the type of the payload (json, longtext or
-- longblob), and the columns that --column renames. By hand, change it there.
CREATE TABLE /*table*/ outbox /**/ (
    -- The id and the code become headers.
    /*id*/ id /**/ BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    -- The record's key: rows of one key arrive in the order of their commits.
    /*key*/ stid /**/ VARCHAR(255) NOT NULL,
    /*type*/ code /**/ VARCHAR(255) NOT NULL,
    -- The order of a key's rows, for whoever polls. (A word of the language since MySQL 8, so it is quoted.)
    `rank` INT NOT NULL DEFAULT 0,
    /*payload*/ payload /**/ /*payload_type*/ JSON /**/,
    -- The rest is for whoever polls, and for whoever confirms the receipt; the log needs none of it.
    processed SMALLINT NOT NULL DEFAULT 0,
    publish SMALLINT NOT NULL DEFAULT 0,
    produced_at DATETIME(6),
    /*received_at*/ received_at /**/ DATETIME(6),
    retry INT NOT NULL DEFAULT 0,
    error_code VARCHAR(255),
    INDEX outboxd_pending (processed, stid, `rank`, id, produced_at),
    INDEX outboxd_received (/*received_at*/ received_at /**/)
) CHARACTER SET utf8mb4;
