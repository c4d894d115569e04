-- The outbox table of the layout `debezium`, as Debezium's outbox event router expects it. Runs as it stands (psql -f
-- debezium.sql). What is between /*name*/ and /**/ is what `outboxd init` puts in: the table's name, the type of the
-- payload (jsonb, json, text or bytea), the default of the id (uuidv7() from PostgreSQL 18 on), and the columns that
-- --column renames. By hand, change it there.
CREATE TABLE /*table*/ outboxevent /**/ (
    /*id*/ id /**/ uuid PRIMARY KEY DEFAULT /*id_default*/ gen_random_uuid() /**/,
    -- The last part of the topic: outbox.event.{aggregatetype}.
    /*topic*/ aggregatetype /**/ varchar(255) NOT NULL,
    -- The record's key: rows of one key arrive in the order of their commits.
    /*key*/ aggregateid /**/ varchar(255) NOT NULL,
    /*type*/ type /**/ varchar(255) NOT NULL,
    /*payload*/ payload /**/ /*payload_type*/ jsonb /**/
);
