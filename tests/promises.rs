//! The promises, each proved against real servers: `tests/run` brings them up and sets the environment.
//! One binary, so that everything is linked once; one module a promise.

mod promises {
    mod demo;
    mod postgres_connection;
}
