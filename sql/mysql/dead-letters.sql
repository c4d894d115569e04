-- Where events wait that could not be delivered, for `--dead-letter table:outboxd_dead_letters` and `outboxd dlq`. Runs as it
-- stands. What is between /*table*/ and /**/ is what `outboxd init` puts in: the table's name. By hand, change it there.
--
--   fingerprint   the same for the same event of the same commit, so that a repeat after a crash makes no second letter
--   event_id      the event's id, where it has one
--   topic         where it should have gone; null when it never became a record
--   key, value    the record's, byte for byte
--   headers       the record's: an array of [name, value], where a value that is no text is {"base64": "…"}
--   position      the commit it was part of
--   replayed_at   when it was sent again and acknowledged
CREATE TABLE IF NOT EXISTS /*table*/ outboxd_dead_letters /**/ (
    id           BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    fingerprint  BINARY(32)   NOT NULL UNIQUE,
    pipeline     VARCHAR(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    publisher    VARCHAR(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    source_table VARCHAR(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    event_id     LONGTEXT     CHARACTER SET utf8mb4,
    topic        LONGTEXT     CHARACTER SET utf8mb4,
    `key`        LONGBLOB,
    value        LONGBLOB,
    headers      JSON         NOT NULL,
    position     LONGTEXT     CHARACTER SET utf8mb4 NOT NULL,
    reason       LONGTEXT     CHARACTER SET utf8mb4 NOT NULL,
    attempts     INT UNSIGNED NOT NULL,
    failed_at    DATETIME(6)  NOT NULL,
    replayed_at  DATETIME(6),
    -- For who looks for those that wait.
    INDEX outboxd_waiting (pipeline, publisher, replayed_at, id)
);
