//! `outboxd init`.

use super::InitOptions;
use crate::config::Settings;
use crate::failure::{ExitCode, Halt};

pub async fn run(_settings: Settings, _options: InitOptions) -> Result<ExitCode, Halt> {
    Ok(ExitCode::Done)
}
