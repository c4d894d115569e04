//! `outboxd init`: makes what a pipeline stands on, or prints the statements.

mod inbox;

use super::{InitOptions, print};
use crate::config::{Capture, PipelineSettings, Settings, SourceSettings, Span};
use crate::failure::{ExitCode, Failure, Halt};
use crate::retention::rule;
use crate::route::Plans;
use crate::route::layout::{Layout, Role};
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
    let (by_day, ttl) = (options.partition_by.is_some(), options.ttl.map(|Span(age)| age));
    if let Some((what, remedy)) = refusal(pipeline, options) {
        return Err(Halt { code: ExitCode::Usage, what, remedy: remedy.to_owned() });
    }
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
                by_day,
                ttl,
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
                by_day,
                ttl,
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
                by_day,
                ttl,
            };
            match options.dry_run {
                true => say(Box::pin(mongodb::setup::dry_run(&wanted)).await.map_err(halt)?.trim_end()),
                false => Box::pin(mongodb::setup::init(&wanted, say)).await.map_err(halt)?,
            }
        }
    }
    Ok(())
}

/// What is asked for and cannot be, with what to do instead.
fn refusal(pipeline: &PipelineSettings, options: InitOptions) -> Option<(String, &'static str)> {
    let (layout, documents) = (&pipeline.route.layout, matches!(pipeline.source, SourceSettings::Mongo(_)));
    if options.partition_by.is_some() {
        if documents {
            let what = "--partition-by: MongoDB's collections have no partitions".to_owned();
            return Some((what, "use --prune-after, or --ttl with --capture poll"));
        }
        // Templates without a timestamp have no place for the partitions either.
        let own = Layout::named(layout).and_then(|layout| layout.column(Role::Timestamp));
        if own.is_none() || rule::timestamp(pipeline).is_none() {
            let what = format!("--partition-by: the layout `{layout}` has no timestamp to partition by");
            return Some((what, "use a layout with one, or --prune-after, which needs --column timestamp=COLUMN"));
        }
    }
    let Span(ttl) = options.ttl?;
    if !documents {
        return Some(("--ttl is an index of MongoDB".to_owned(), "use --prune-after"));
    }
    if ttl.as_secs() == 0 || ttl.as_secs() > u64::from(i32::MAX.cast_unsigned()) {
        return Some(("--ttl must be a second at the least, and 68 years at the most".to_owned(), "say another"));
    }
    let marked = layout == "native" && (options.status_columns || !matches!(pipeline.capture, Capture::Log));
    let has_status = Layout::named(layout).is_some_and(|layout| layout.polling.is_some());
    if !has_status || (layout == "native" && !marked) {
        let what = format!(
            "--ttl would delete documents of the layout `{layout}` that were not delivered yet: nothing in them says that they were"
        );
        return Some((
            what,
            "use --prune-after, which waits for the confirmed position; or --status-columns, or --capture poll",
        ));
    }
    None
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
