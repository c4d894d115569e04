pub mod failure;
pub mod position;
