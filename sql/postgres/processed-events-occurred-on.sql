-- What the one consumer of the layout `occurred-on` remembers: the ids of the events that it has processed. Runs as it
-- stands, after CREATE SCHEMA outbox, and a second time changes nothing. For several consumers, or for versions, take
-- processed-events.sql. How it is used is in docs/consumers.md.
CREATE TABLE IF NOT EXISTS outbox.processed_events (
    event_id     uuid PRIMARY KEY,
    processed_at timestamptz NOT NULL DEFAULT now()
);
-- For who deletes the old ones.
CREATE INDEX IF NOT EXISTS processed_events_processed_at ON outbox.processed_events (processed_at);
