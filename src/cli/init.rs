//! `outboxd init`: makes what a pipeline stands on, or prints the statements.

use super::{InitOptions, print};
use crate::config::{Settings, SourceSettings};
use crate::failure::{ExitCode, Failure, Halt};
use crate::route::Plan;
use crate::source::SourceFailure;
use crate::source::postgres::setup::{self, Wanted};

pub async fn run(settings: Settings, options: InitOptions) -> Result<ExitCode, Halt> {
    for pipeline in &settings.pipelines {
        let plan = Plan::compile(&pipeline.route).map_err(|error| Halt {
            code: ExitCode::Usage,
            what: format!("pipeline `{}`: {error}", pipeline.name),
            remedy: String::new(),
        })?;
        let SourceSettings::Postgres(source) = &pipeline.source;
        let wanted = Wanted {
            settings: source,
            pipeline: &pipeline.name,
            route: &pipeline.route,
            projection: plan.projection(),
            payload: options.payload.as_sql(),
        };
        if options.dry_run {
            let script = setup::dry_run(&wanted).await.map_err(halt)?;
            print(script.as_bytes())?;
        } else {
            let mut printed = Ok(ExitCode::Done);
            let mut say = |line: &str| {
                if printed.is_ok() {
                    printed = print(format!("{line}\n").as_bytes());
                }
            };
            setup::init(&wanted, &mut say).await.map_err(halt)?;
            printed?;
        }
    }
    Ok(ExitCode::Done)
}

/// Here nobody waits for trouble to pass.
fn halt(failure: SourceFailure) -> Halt {
    match Failure::from(failure) {
        Failure::Halt(halt) => halt,
        Failure::Retry { what } | Failure::StandBy { what } | Failure::Again { what } => Halt {
            code: ExitCode::SourceNotReady,
            what,
            remedy: "run it again when the server can be reached; what was done is kept".to_owned(),
        },
    }
}
