//! `outboxd init`: makes what a pipeline stands on, or prints the statements.

mod inbox;

use super::{InitOptions, print};
use crate::config::{PipelineSettings, Settings, SourceSettings};
use crate::failure::{ExitCode, Failure, Halt};
use crate::route::Plans;
use crate::source::schema::Wanted;
use crate::source::{SourceFailure, mongodb, mysql, postgres};

pub async fn run(settings: Settings, options: InitOptions) -> Result<ExitCode, Halt> {
    for pipeline in &settings.pipelines {
        let mut printed = Ok(ExitCode::Done);
        let mut say = |line: &str| {
            if printed.is_ok() {
                printed = print(format!("{line}\n").as_bytes());
            }
        };
        Box::pin(make(pipeline, options, &mut say)).await?;
        printed?;
    }
    Ok(ExitCode::Done)
}

/// Makes what one pipeline stands on, saying a line for each thing.
pub async fn make(pipeline: &PipelineSettings, options: InitOptions, say: &mut dyn FnMut(&str)) -> Result<(), Halt> {
    if options.inbox {
        return inbox::make(pipeline, options.dry_run, say).await;
    }
    let plans = Plans::compile(pipeline)?;
    let InitOptions { status_columns, notify, .. } = options;
    if notify && !matches!(pipeline.source, SourceSettings::Postgres(_)) {
        let what = "--notify is a trigger of PostgreSQL".to_owned();
        return Err(Halt { code: ExitCode::Usage, what, remedy: "leave it out".to_owned() });
    }
    match &pipeline.source {
        SourceSettings::Postgres(source) => {
            let payload = options.payload.of_postgres();
            let wanted = Wanted {
                settings: source,
                of: pipeline,
                projection: &plans.projection,
                payload,
                status_columns,
                notify,
            };
            match options.dry_run {
                true => say(postgres::setup::dry_run(&wanted).await.map_err(halt)?.trim_end()),
                false => postgres::setup::init(&wanted, say).await.map_err(halt)?,
            }
        }
        SourceSettings::MySql(source) => {
            let payload = options.payload.of_mysql();
            let wanted = Wanted {
                settings: source,
                of: pipeline,
                projection: &plans.projection,
                payload,
                status_columns,
                notify,
            };
            match options.dry_run {
                true => say(mysql::setup::dry_run(&wanted).await.map_err(halt)?.trim_end()),
                false => mysql::setup::init(&wanted, say).await.map_err(halt)?,
            }
        }
        SourceSettings::Mongo(source) => {
            // A document's fields have no types beforehand.
            let payload = "";
            let wanted = Wanted {
                settings: source,
                of: pipeline,
                projection: &plans.projection,
                payload,
                status_columns,
                notify,
            };
            match options.dry_run {
                true => say(Box::pin(mongodb::setup::dry_run(&wanted)).await.map_err(halt)?.trim_end()),
                false => Box::pin(mongodb::setup::init(&wanted, say)).await.map_err(halt)?,
            }
        }
    }
    Ok(())
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
