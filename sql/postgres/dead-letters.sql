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
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    fingerprint  bytea NOT NULL UNIQUE,
    pipeline     text NOT NULL,
    publisher    text NOT NULL,
    source_table text NOT NULL,
    event_id     text,
    topic        text,
    key          bytea,
    value        bytea,
    headers      json NOT NULL,
    position     text NOT NULL,
    reason       text NOT NULL,
    attempts     integer NOT NULL,
    failed_at    timestamptz NOT NULL DEFAULT now(),
    replayed_at  timestamptz,
    -- For who looks for those that wait.
    UNIQUE (pipeline, publisher, replayed_at, id)
);
