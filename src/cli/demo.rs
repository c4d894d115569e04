//! `outboxd demo`.

use super::DemoArgs;
use crate::failure::{ExitCode, Halt};

pub async fn run(_args: DemoArgs) -> Result<ExitCode, Halt> {
    Ok(ExitCode::Done)
}
