pub mod ack_window;
pub mod event;
pub mod failure;
pub mod position;
pub mod route;
pub mod sink;
pub mod source;
