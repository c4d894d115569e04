-- Wakes the poller at every commit that adds rows, so that they are found in milliseconds. PostgreSQL takes a lock of the
-- whole cluster while a transaction that notifies commits: such commits wait for one another. That is nothing at hundreds of
-- commits a second, and the limit at thousands: polling without it costs an interval of latency and no more.
CREATE OR REPLACE FUNCTION outboxd_notify() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_catalog.pg_notify(TG_ARGV[0], ''); RETURN NULL; END $$;
CREATE OR REPLACE TRIGGER outboxd_notify AFTER INSERT ON /*table*/ outbox /**/
    FOR EACH STATEMENT EXECUTE FUNCTION outboxd_notify(/*channel*/ 'outboxd_public_outbox' /**/);
