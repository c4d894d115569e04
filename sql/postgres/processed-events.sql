-- What a consumer remembers, in its own database: the events that it has processed, and the last version of each entity.
-- Runs as it stands (psql -f processed-events.sql), and a second time changes nothing. How it is used is in
-- docs/consumers.md: in the same transaction as whatever the consumer does with the event.
--
--   consumer_group   whose memory it is; several consumers may share the tables
--   event_id         the event's id: the header `id`, or `event_id` with the layout `entity`
--   entity_type, entity_id, entity_version   what the event is about, where it has a version
CREATE TABLE IF NOT EXISTS processed_events (
    consumer_group text NOT NULL,
    event_id       text NOT NULL,
    entity_type    text,
    entity_id      text,
    entity_version bigint,
    processed_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_group, event_id)
);
-- For who deletes the old ones.
CREATE INDEX IF NOT EXISTS processed_events_processed_at ON processed_events (processed_at);

-- One row an entity: the row that two transactions with events of one entity wait for each other on. It outlives the rows
-- above, so that a late version is known for late however long ago the others were processed.
CREATE TABLE IF NOT EXISTS processed_versions (
    consumer_group text NOT NULL,
    entity_type    text NOT NULL,
    entity_id      text NOT NULL,
    entity_version bigint NOT NULL,
    event_id       text NOT NULL,
    seen_at        timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_group, entity_type, entity_id)
) WITH (fillfactor = 80);
