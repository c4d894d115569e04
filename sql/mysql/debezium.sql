-- The outbox table of the layout `debezium`, as Debezium's outbox event router expects it. Runs as it stands (mysql
-- DATABASE < debezium.sql). What is between /*name*/ and /**/ is what `outboxd init` puts in: the table's name, the type
-- of the payload (json, longtext or longblob), and the columns that --column renames. By hand, change it there.
CREATE TABLE /*table*/ outboxevent /**/ (
    /*id*/ id /**/ CHAR(36) CHARACTER SET ascii NOT NULL DEFAULT (uuid()) PRIMARY KEY,
    -- The last part of the topic: outbox.event.{aggregatetype}.
    /*topic*/ aggregatetype /**/ VARCHAR(255) NOT NULL,
    -- The record's key: rows of one key arrive in the order of their commits.
    /*key*/ aggregateid /**/ VARCHAR(255) NOT NULL,
    /*type*/ type /**/ VARCHAR(255) NOT NULL,
    /*payload*/ payload /**/ /*payload_type*/ JSON /**/
) CHARACTER SET utf8mb4;
