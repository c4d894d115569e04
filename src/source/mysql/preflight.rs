//! `check` on the side of MySQL or MariaDB: everything that stands in the way of a run, and what would hurt it later.
//! Nothing is created or changed. What a run itself would refuse is judged by the same functions ([`judge`]).

use super::checkpoint::{self, Place};
use super::conninfo::{ConnInfo, SslMode, TlsOptions};
use super::judge::{self, Standing};
use super::privileges::{self, Right};
use super::server::{Reach, Server};
use super::session::{Session, literal, quote};
use super::tables::{self, CatalogTable};
use crate::config::{CheckpointPlace, MySqlSettings, PipelineSettings, TableName};
use crate::event::Projection;
use crate::figures;
use crate::preflight::{Finding, Protection, Report, is_local};
use crate::source::backfill;

/// A log that is kept for less than this is lost over a long weekend.
const SHORT_RETENTION: u64 = 3 * 86_400;

/// Looks at everything that a run needs of the server.
pub async fn preflight(settings: &MySqlSettings, of: &PipelineSettings, projection: &Projection) -> Vec<Finding> {
    let mut report = Report::about("SOURCE");
    // What ends the look early has been reported.
    let _ = look(&mut report, settings, of, projection).await;
    report.into_findings()
}

async fn look(
    report: &mut Report,
    settings: &MySqlSettings,
    of: &PipelineSettings,
    projection: &Projection,
) -> Option<()> {
    let info = report.told("connection", super::conninfo(settings))?;
    report.on(info.describe());
    let database = report.told("connection", checkpoint::database(&info))?.to_owned();
    // Whoever has no right to the database yet is to be told of all that is lacking.
    let tls = info.tls.clone();
    let outside = ConnInfo { database: None, ..info };
    let mut session = report.told("connection", super::connect(settings, &outside).await)?;
    if let Err(error) = session.try_query(&format!("USE {}", quote(&database))).await
        && error.code() != Some(privileges::NO_RIGHT_TO_DATABASE)
    {
        report.refused("connection", session.classify(error));
        return None;
    }
    let (flavor, version) = (session.flavor, session.server_version().to_owned());
    let address = session.describe();
    report.on(&address).ok("connection", format!("{flavor} {version} answers"));
    protection(report, &tls, &session);
    let server = report.told("server", Server::ask(&mut session).await)?;
    server_settings(report, &server, settings);
    let account = report.told("privileges", privileges::account(&mut session).await)?;
    report.on(format!("user {account}"));
    log_privileges(report, &mut session, &account).await?;

    let reach = report.on(&address).told("log", server.reach(&mut session).await);
    if let Some(reach) = &reach {
        let bytes: u64 = reach.files.iter().map(|(_, size)| size).sum();
        let (files, bytes) = (reach.files.len(), figures::bytes(bytes));
        report.ok("log", format!("{files} files, {bytes}, from {} to {}", reach.first.file, reach.end.file));
    }
    let (catalog, mut missing) = report.told("table", tables::find(&mut session, &database, &settings.tables).await)?;
    report.on(format!("user {account}"));
    let denied = table_privileges(report, &mut session, &account, &database, &settings.tables).await?;
    // A table that the user has no right to is none in the catalog either.
    missing.retain(|table| !denied.contains(table));
    report.on(settings.tables.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "));
    let mut wrong = judge::missing_tables(&missing, &database);
    wrong.extend(tables::missing_columns(&catalog, projection));
    if wrong.is_empty() && denied.is_empty() {
        table_findings(report, &catalog, projection);
    }
    for failure in wrong {
        report.refused("table", failure);
    }
    report.on(settings.checkpoint.describe());
    let place = report.told("checkpoint", Place::open(&settings.checkpoint, &of.kafka))?;
    if place.is_table() {
        checkpoint_table(report, &mut session, &account, &database, settings.no_create).await?;
    } else if report.told("checkpoint", place.check_writable().await).is_some() {
        report.ok("checkpoint", "can be reached");
    }
    report.on(format!("pipeline {}", of.name));
    position(report, &mut session, &server, reach.as_ref(), &place, of, &database).await;
    session.close().await;
    Some(())
}

fn protection(report: &mut Report, tls: &TlsOptions, session: &Session) {
    let mode = format!("ssl-mode={}", tls.mode);
    let seen = match (session.is_encrypted(), tls.mode) {
        (false, _) => Protection::Plain(&mode),
        (true, SslMode::VerifyCa | SslMode::VerifyIdentity) => Protection::Verified(&mode),
        (true, _) => Protection::Unverified(&mode),
    };
    let remedy = "add ssl-mode=verify-identity and ssl-ca=/path/to/ca.pem to SOURCE";
    report.tls(seen, is_local(&session.host().name), remedy);
}

/// What is read, of tables that have all that is needed.
fn table_findings(report: &mut Report, catalog: &[CatalogTable], projection: &Projection) {
    for table in catalog {
        let read: Vec<_> = projection.columns().map(|(_, name, _)| name).filter(|name| table.has(name)).collect();
        report.on(table.quoted()).ok("table", format!("has what the layout needs: {}", read.join(", ")));
    }
}

fn server_settings(report: &mut Report, server: &Server, settings: &MySqlSettings) {
    let wrong = judge::settings(server);
    if wrong.is_empty() {
        let format = if server.format.is_empty() { "ROW" } else { &server.format };
        report.ok("binlog", format!("log_bin = ON, binlog_format = {format}, server_id = {}", server.server_id));
    }
    for failure in wrong {
        report.refused("binlog", failure);
    }
    match server.row_metadata.as_str() {
        "FULL" => report.ok("metadata", "binlog_row_metadata is FULL: rows come with the names of their columns"),
        "" => report.warn(
            "metadata",
            "the server cannot log the names of columns",
            "upgrade to MySQL 8.0 or MariaDB 10.5",
        ),
        other => report.warn(
            "metadata",
            format!(
                "binlog_row_metadata is {other}: names of columns come from the catalog, and a change of the table \
                     while rows wait to be read halts"
            ),
            "SET GLOBAL binlog_row_metadata = FULL, and put it into my.cnf",
        ),
    }
    if server.row_image == "FULL" {
        report.ok("row-image", "binlog_row_image = FULL");
    } else {
        report.warn(
            "row-image",
            format!("binlog_row_image is {}: a column that takes its default is not in the log", server.row_image),
            "SET GLOBAL binlog_row_image = FULL, and put it into my.cnf",
        );
    }
    match server.has_gtids() {
        true => report.ok("gtid", "GTIDs are on: the position holds on every server of the group"),
        false => report.warn(
            "gtid",
            format!(
                "gtid_mode is {}: the position is a file and an offset, which hold for this server alone",
                server.gtid_mode
            ),
            "turn GTIDs on: gtid_mode = ON, enforce_gtid_consistency = ON",
        ),
    }
    match server.expires {
        0 => report.ok("retention", "log files are kept until they are purged by hand"),
        seconds if seconds < SHORT_RETENTION => report.warn(
            "retention",
            format!("log files are deleted after {} h, also if outboxd has not read them", seconds / 3600),
            "SET GLOBAL binlog_expire_logs_seconds = 604800 (a week), and put it into my.cnf",
        ),
        seconds => report.ok("retention", format!("log files are kept for {} h", seconds / 3600)),
    }
    match (server.read_only, &settings.checkpoint) {
        (true, CheckpointPlace::Source) => report.fail(
            "read-only",
            "the server is read-only, so the checkpoint cannot be stored there",
            "connect to the primary, or use --checkpoint kafka or file:PATH",
        ),
        (true, elsewhere) => {
            report.ok("read-only", format!("the server is read-only; the checkpoint is in {}", elsewhere.describe()));
        }
        (false, _) => report.ok("read-only", "read_only = OFF"),
    }
    match settings.server_id {
        Some(id) if u64::from(id) == server.server_id => {
            let remedy = "choose another, or leave it out";
            report.fail("server-id", format!("--server-id {id} is the server's own"), remedy);
        }
        Some(id) => report.ok("server-id", format!("outboxd reads as {id}; no other reader may")),
        None => report.ok("server-id", "outboxd reads under a random one"),
    }
}

async fn log_privileges(report: &mut Report, session: &mut Session, account: &str) -> Option<()> {
    let grants = report.told("privileges", session.query("SHOW GRANTS").await)?;
    let grants: Vec<String> = grants.iter().map(|row| row.string(0).to_ascii_uppercase()).collect();
    let global = |names: &[&str]| {
        grants.iter().any(|grant| {
            grant.contains(" ON *.* ")
                && (grant.contains("ALL PRIVILEGES") || names.iter().any(|name| grant.contains(name)))
        })
    };
    // Rights that come through a role are not all shown here; the server has the last word when the log is opened.
    let through_role = grants.iter().any(|grant| !grant.contains(" ON "));
    let mut lacking = Vec::new();
    if !global(&["REPLICATION SLAVE", "REPLICATION REPLICA"]) {
        lacking.push("REPLICATION SLAVE");
    }
    if !global(&["REPLICATION CLIENT", "BINLOG MONITOR", "SUPER"]) {
        lacking.push("REPLICATION CLIENT");
    }
    match lacking.is_empty() {
        true => report.ok("privileges", "may read the log: REPLICATION SLAVE, REPLICATION CLIENT"),
        false if through_role => report.warn(
            "privileges",
            format!("{} is not among the user's own grants; it may come through a role", lacking.join(" and ")),
            "see sql/mysql/grants.sql",
        ),
        false => report.fail(
            "privileges",
            format!("the user lacks {}", lacking.join(" and ")),
            format!("GRANT {} ON *.* TO {account}; as an administrator", lacking.join(", ")),
        ),
    }
    Some(())
}

/// The tables that the user may not read.
async fn table_privileges(
    report: &mut Report,
    session: &mut Session,
    account: &str,
    database: &str,
    names: &[TableName],
) -> Option<Vec<TableName>> {
    let mut denied = Vec::new();
    for name in names {
        let table = qualified(name.schema.as_deref().unwrap_or(database), &name.name);
        let asked = privileges::lacking(session, &table, &[Right::Select]).await;
        if !report.told("privileges", asked)?.is_empty() {
            report.fail(
                "privileges",
                format!("the user lacks SELECT on {table}"),
                format!("GRANT SELECT ON {table} TO {account}; as an administrator, after `outboxd init`"),
            );
            denied.push(name.clone());
        }
    }
    if denied.is_empty() {
        report.ok("privileges", "may read the outbox");
    }
    Some(denied)
}

/// Whether the checkpoint can be read and written, in its table or in one that the first run makes.
async fn checkpoint_table(
    report: &mut Report,
    session: &mut Session,
    account: &str,
    database: &str,
    no_create: bool,
) -> Option<()> {
    const USED: [Right; 3] = [Right::Select, Right::Insert, Right::Update];
    const MADE: [Right; 4] = [Right::Create, Right::Select, Right::Insert, Right::Update];
    let exists = report.told("checkpoint", checkpoint::table_exists(session, database).await)?;
    let table = qualified(database, "outboxd_checkpoint");
    let wanted: &[Right] = if exists || no_create { &USED } else { &MADE };
    let lacking = report.told("privileges", privileges::lacking(session, &table, wanted).await)?;
    if lacking.is_empty() {
        report.ok("privileges", format!("may read and write {table}"));
    } else {
        // On a table that is not there yet nothing can be granted without CREATE.
        let with_create = !exists && !no_create && !lacking.contains(&Right::Create);
        let create = if with_create { "CREATE, " } else { "" };
        let rights = privileges::list(&lacking);
        let after = if no_create { ", after `outboxd init`" } else { "" };
        report.fail(
            "privileges",
            format!("the user lacks {rights} on {table}"),
            format!("GRANT {create}{rights} ON {table} TO {account}; as an administrator{after}"),
        );
    }
    match (exists, no_create) {
        // A table that the user has no right to does not exist for it.
        (false, true) => report.fail("checkpoint", "there is no table outboxd_checkpoint", "outboxd init"),
        (false, false) if lacking.is_empty() => {
            report.ok("checkpoint", "the table outboxd_checkpoint will be made by the first run");
        }
        (true, _) if lacking.is_empty() => report.ok("checkpoint", format!("{table} is there")),
        _ => {}
    }
    (exists && lacking.is_empty()).then_some(())
}

fn qualified(database: &str, table: &str) -> String {
    format!("{}.{}", quote(database), quote(table))
}

async fn position(
    report: &mut Report,
    session: &mut Session,
    server: &Server,
    reach: Option<&Reach>,
    place: &Place,
    of: &PipelineSettings,
    database: &str,
) -> Option<()> {
    let pipeline = of.name.as_str();
    let stored = report.told("checkpoint", place.peek(session, pipeline).await)?;
    let Some(stored) = stored else {
        report.ok("position", format!("none yet: pipeline `{pipeline}` has never run"));
        return None;
    };
    let at = report.told("position", judge::position(&stored, server))?;
    match judge::standing(pipeline, &stored, &at, server, reach?) {
        Standing::Fits => report.ok("position", format!("{at}")),
        Standing::Behind { what } => report.warn("position", what, "wait until the replica has caught up"),
        Standing::Lost { failure, fillable } => backfill::report_loss(report, of, failure, fillable),
    }
    let asked = format!("SELECT IS_USED_LOCK({})", literal(&super::keeper::lock_name(database, pipeline)));
    match session.query_one(&asked).await.map(|row| row.text(0)) {
        Ok(Some(holder)) => {
            let seen = format!("an instance runs this pipeline now (connection {holder}); another one stands by");
            report.ok("leader", seen);
        }
        Ok(None) => report.ok("leader", "no instance runs this pipeline now"),
        Err(_) => {}
    }
    Some(())
}
