//! `outboxd check`.

use crate::config::Settings;
use crate::failure::{ExitCode, Halt};

pub async fn run(_settings: Settings) -> Result<ExitCode, Halt> {
    Ok(ExitCode::Done)
}
