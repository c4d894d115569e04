-- What a consumer remembers, in its own database: the events that it has processed, and the last version of each entity.
-- Runs as it stands (mysql DATABASE < processed-events.sql), and a second time changes nothing. How it is used is in
-- docs/consumers.md: in the same transaction as whatever the consumer does with the event.
--
--   consumer_group   whose memory it is; several consumers may share the tables
--   event_id         the event's id: the header `id`, or `event_id` with the layout `entity`
--   entity_type, entity_id, entity_version   what the event is about, where it has a version
CREATE TABLE IF NOT EXISTS processed_events (
    consumer_group VARCHAR(191) NOT NULL,
    event_id       VARCHAR(255) NOT NULL,
    entity_type    VARCHAR(191),
    entity_id      VARCHAR(255),
    entity_version BIGINT,
    processed_at   DATETIME(6) NOT NULL DEFAULT (utc_timestamp(6)),
    PRIMARY KEY (consumer_group, event_id),
    -- For who deletes the old ones.
    INDEX processed_events_processed_at (processed_at)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- One row an entity: the row that two transactions with events of one entity wait for each other on. It outlives the rows
-- above, so that a late version is known for late however long ago the others were processed.
CREATE TABLE IF NOT EXISTS processed_versions (
    consumer_group VARCHAR(191) NOT NULL,
    entity_type    VARCHAR(191) NOT NULL,
    entity_id      VARCHAR(255) NOT NULL,
    entity_version BIGINT NOT NULL,
    event_id       VARCHAR(255) NOT NULL,
    seen_at        DATETIME(6) NOT NULL DEFAULT (utc_timestamp(6)),
    PRIMARY KEY (consumer_group, entity_type, entity_id)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
