-- Where the publishers of each pipeline stand, and which are paused: for pipelines with several publishers, and for those
-- that were paused. One row a pipeline, written now and then.
CREATE TABLE IF NOT EXISTS outboxd_publishers (
    pipeline   text PRIMARY KEY,
    document   jsonb NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);
