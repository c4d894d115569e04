-- Who changed a pipeline's position by hand (`outboxd position set`), when, from where to where, and why. Only added to: a
-- change that could not be carried out after all has a second row that says so. `publisher` is null where all are meant.
CREATE TABLE IF NOT EXISTS outboxd_audit (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    pipeline      text NOT NULL,
    publisher     text,
    action        text NOT NULL,
    position_from text,
    position_to   text NOT NULL,
    reason        text NOT NULL,
    database_user text NOT NULL DEFAULT session_user,
    os_user       text NOT NULL
);
