-- How far each publisher of each topic has come in the layout `event-store`, when it is polled. Operators may write here:
-- `status` to PAUSED and back to ACTIVE, and `last_transaction_id` with `last_position` to go back or ahead.
CREATE TABLE IF NOT EXISTS outbox_topic_progress (
    topic               text NOT NULL,
    publisher           text NOT NULL,
    last_position       bigint NOT NULL DEFAULT 0,
    last_transaction_id xid8 NOT NULL DEFAULT '0',
    status              text NOT NULL DEFAULT 'ACTIVE' CHECK (status IN ('ACTIVE', 'PAUSED', 'FAILED')),
    error_count         integer NOT NULL DEFAULT 0,
    last_error          text,
    last_published_at   timestamptz,
    leader_instance     text,
    leader_heartbeat    timestamptz,
    PRIMARY KEY (topic, publisher)
);
