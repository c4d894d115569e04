-- A role that may relay and nothing else. Run it as the database's owner after `outboxd init`, with the names and the
-- password changed to yours; then `outboxd run --no-create postgres://outboxd_relay@…` needs no more than this.
--
-- REPLICATION lets it read the slot. That is the whole log of the database as far as a publication lets it through, and
-- PostgreSQL has no finer right. On Amazon RDS: CREATE ROLE outboxd_relay LOGIN …; GRANT rds_replication TO outboxd_relay.
CREATE ROLE outboxd_relay LOGIN REPLICATION PASSWORD 'change me';

-- Only where these rights were taken away from PUBLIC:
-- GRANT CONNECT ON DATABASE shop TO outboxd_relay;
-- GRANT USAGE ON SCHEMA public TO outboxd_relay;

-- Where it stands. No DELETE: giving a position up is a person's decision.
GRANT SELECT, INSERT, UPDATE ON outboxd_checkpoint, outboxd_publishers TO outboxd_relay;

-- Only for who sets positions by hand (`outboxd position set`); the record can be added to and not changed:
-- GRANT INSERT ON outboxd_audit TO outboxd_relay;

-- Only for --snapshot existing, which reads the rows already in the table; the log is read without it.
-- GRANT SELECT ON outbox TO outboxd_relay;

-- Only for --dead-letter table:outboxd_dead_letters; the identity column needs no right of its own.
-- GRANT SELECT, INSERT ON outboxd_dead_letters TO outboxd_relay;
-- And for who replays and purges (`outboxd dlq`):
-- GRANT SELECT, UPDATE, DELETE ON outboxd_dead_letters TO outboxd_relay;

-- Only for --mark, which writes the status of delivered rows (these are the columns of the layout `native`):
-- GRANT SELECT (id, status, attempts), UPDATE (status, published_at, attempts, last_error, locked_by, locked_until)
--     ON outbox TO outboxd_relay;

-- Only for --capture poll, which needs no REPLICATION: rows are claimed and marked in the table itself. An event store is only
-- read, and its progress is written.
-- GRANT SELECT, UPDATE ON outbox TO outboxd_relay;
-- GRANT SELECT ON events TO outboxd_relay;
-- GRANT SELECT, INSERT, UPDATE ON outbox_topic_progress TO outboxd_relay;

-- Only for retention (--prune-after, `outboxd prune`): rows are found by SELECT and deleted by DELETE.
-- GRANT SELECT, DELETE ON outbox TO outboxd_relay;
-- To make and drop partitions one must be the table's owner, or a member of that role. Or let a job that is run `outboxd
-- prune` every day; the relay then does without.
-- GRANT shop_owner TO outboxd_relay;
