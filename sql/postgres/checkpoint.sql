-- Where each pipeline stands. The slot alone cannot tell a first start from a slot that somebody dropped, or this
-- server from another one: this row can. One row a pipeline, written now and then.
CREATE TABLE IF NOT EXISTS outboxd_checkpoint (
    pipeline          text PRIMARY KEY,
    format            integer NOT NULL,
    system_identifier text NOT NULL,
    timeline          integer NOT NULL,
    slot              text NOT NULL,
    position          pg_lsn NOT NULL,
    snapshot          text NOT NULL DEFAULT 'none' CHECK (snapshot IN ('none', 'pending', 'done', 'backfill')),
    updated_at        timestamptz NOT NULL DEFAULT now()
);
