//! The promises, each proved against real servers: `tests/run` brings them up and sets the environment.
//! One binary, so that everything is linked once; one module a promise.

// A support that only some promises need is still one of all.
#[allow(dead_code, unused_imports)]
mod support;

mod promises {
    mod admin_address;
    mod capture;
    mod commands;
    mod confirm;
    mod contract;
    mod dead_letter_commands;
    mod dead_letters;
    mod dead_letters_at_work;
    mod demo;
    mod documentation;
    mod event_store;
    mod fan_out;
    mod fan_out_trouble;
    mod fast_shutdown_is_not_blocked;
    mod http_sink;
    mod http_trouble;
    mod inbox;
    mod inbox_statements;
    mod init;
    mod kafka_sink;
    mod layouts;
    mod lost_position;
    mod mongodb_checkpoint;
    mod mongodb_commands;
    mod mongodb_connection;
    mod mongodb_elections;
    mod mongodb_faults;
    mod mongodb_leader;
    mod mongodb_outage;
    mod mongodb_records;
    mod mongodb_snapshot;
    mod mongodb_stream;
    mod mysql_checkpoint;
    mod mysql_commands;
    mod mysql_connection;
    mod mysql_log;
    mod mysql_start;
    mod mysql_types;
    mod payloads;
    mod poison_records;
    mod postgres_connection;
    mod preflight;
    mod preflight_kafka;
    mod process;
    mod rabbitmq_sink;
    mod rabbitmq_trouble;
    mod retention;
    mod secrets;
    mod silent_network;
    mod snapshot;
    mod stdout_sink;
}
