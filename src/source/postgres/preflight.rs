//! `check` on PostgreSQL's side: everything that stands in the way of a run, and what would hurt it later. Nothing is
//! created or changed. What a run itself would refuse is judged by the same functions ([`judge`]).

use std::sync::Arc;

use super::checkpoint::{self, Checkpoint};
use super::conninfo::{Address, ConnInfo, SslMode};
use super::server_error::replication_remedy;
use super::slot::{self, PublicationState, SlotState};
use super::sql::{self, SqlSession};
use super::tables::{CatalogTable, Tables, quote};
use super::walsender::{SystemIdentity, WalsenderConnection};
use super::{judge, setup};
use crate::config::{PipelineSettings, PostgresSettings, Snapshot, TableName};
use crate::event::Projection;
use crate::figures;
use crate::preflight::{Finding, Protection, Report, is_local};
use crate::source::{SourceFailure, backfill, notes};

/// A slot that keeps more of the log than this is worth a warning.
const MUCH_RETAINED: u64 = 1 << 30;

/// Looks at everything that a run needs of the server.
pub async fn preflight(settings: &PostgresSettings, of: &PipelineSettings, projection: &Projection) -> Vec<Finding> {
    let mut report = Report::about("SOURCE");
    // What ends the look early has been reported.
    let _ = look(&mut report, settings, of, projection).await;
    report.into_findings()
}

async fn look(
    report: &mut Report,
    settings: &PostgresSettings,
    of: &PipelineSettings,
    projection: &Projection,
) -> Option<()> {
    let (pipeline, no_standby) = (of.name.as_str(), of.no_standby);
    let info = report.told("connection", super::conninfo(settings))?;
    report.on(info.describe());
    let session = Arc::new(report.told("connection", sql::connect(&info).await)?);
    let info = info.pinned_to(session.host());
    let version = session.server_version();
    let (major, minor) = (version / 10_000, version % 10_000);
    let address = session.host().to_string();
    report.on(session.description()).ok("connection", format!("PostgreSQL {major}.{minor} answers"));
    report.on(&address);
    protection(report, &info, &session);
    if let Some(failure) = judge::version(version) {
        report.refused("version", failure);
        return None;
    }
    let facts = report.told("server", Facts::ask(&session).await)?;
    let server = replication(report, &info, &session, &facts).await;
    report.on(&address);
    server_settings(report, &facts);

    let state = report.told("slot", slot::state(&session, &settings.slot, version).await);
    if let Some(state) = &state {
        slot_findings(report, settings, state.as_ref(), &info, &facts, no_standby);
    }
    let stored = checkpoint_findings(report, settings, pipeline, &session, &facts).await;
    if !of.is_lone() {
        publishers_findings(report, settings, &session, &facts).await;
    }
    report.on(format!("pipeline {pipeline}"));
    if let (Some(state), Some(stored), Some(server)) = (&state, &stored, &server) {
        match judge::lost(pipeline, settings, stored.as_ref(), state.as_ref(), server) {
            Some(loss) => backfill::report_loss(report, of, loss.failure, loss.fillable),
            None => position(report, stored.as_ref(), state.as_ref()),
        }
    }

    let (tables, missing) =
        report.on(listed(&settings.tables)).told("table", Tables::find(&session, &settings.tables).await)?;
    let wrong = judge::tables(&missing, &tables, projection);
    if wrong.is_empty() {
        table_findings(report, &tables, projection, settings);
    }
    for failure in wrong {
        report.refused("table", failure);
    }
    report.on(format!("publication {}", settings.publication));
    let publication = slot::publication(&session, &settings.publication, &tables.catalog).await;
    let publication = report.told("publication", publication)?;
    let slot_exists = matches!(state, Some(Some(_)));
    let wrong = judge::publication(settings, publication.as_ref(), &tables.catalog, projection, slot_exists);
    if wrong.is_empty() {
        publication_findings(report, settings, publication.as_ref(), &tables, &session, &facts).await;
    }
    for failure in wrong {
        report.refused("publication", failure);
    }
    let snapshot = match stored.flatten() {
        Some(stored) => stored.snapshot.is_under_way(),
        None => settings.snapshot == Snapshot::Existing,
    };
    if snapshot {
        for table in &tables.catalog {
            report.on(table.quoted());
            let readable = readable(&session, table, projection, &facts).await;
            match report.told("snapshot", readable) {
                Some(None) => report.ok("snapshot", "its rows can be read"),
                Some(Some((what, remedy))) => report.fail("snapshot", what, remedy),
                None => {}
            }
        }
    }
    Some(())
}

fn listed(tables: &[TableName]) -> String {
    match tables {
        [] => "messages".to_owned(),
        tables => tables.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

fn protection(report: &mut Report, info: &ConnInfo, session: &SqlSession) {
    let mode = format!("sslmode={}", info.tls.mode);
    let local = match &session.host().address {
        Address::Unix(_) => true,
        Address::Tcp { name, .. } => is_local(name),
    };
    let seen = match (session.is_encrypted(), info.tls.mode) {
        (false, _) => Protection::Plain(&mode),
        (true, SslMode::VerifyCa | SslMode::VerifyFull) => Protection::Verified(&mode),
        (true, _) => Protection::Unverified(&mode),
    };
    report.tls(seen, local, "add sslmode=verify-full and sslrootcert=/path/to/ca.pem to SOURCE");
}

/// What is read, of tables that have all that is needed.
fn table_findings(report: &mut Report, tables: &Tables, projection: &Projection, settings: &PostgresSettings) {
    for table in &tables.catalog {
        let read: Vec<_> = projection.columns().map(|(_, name, _)| name).filter(|name| table.has(name)).collect();
        let partitioned = if table.partitioned { ", partitioned" } else { "" };
        report.on(table.quoted()).ok("table", format!("has what the layout needs: {}{partitioned}", read.join(", ")));
    }
    if tables.catalog.is_empty() {
        let prefixes = settings.message_prefixes.join(", ");
        report.ok("table", format!("none: only messages with the prefix {prefixes} are read"));
    }
}

/// What the server says of its settings and of our role.
struct Facts {
    /// As SQL takes it.
    role: String,
    replication: bool,
    superuser: bool,
    database: String,
    creates_in_database: bool,
    /// Where an unqualified table would be created, as SQL takes it.
    schema: Option<String>,
    creates_in_schema: bool,
    standby: bool,
    wal_level: String,
    slots: (i64, i32),
    walsenders: (i64, i32),
    /// In MB; -1 is no limit.
    wal_keep: i64,
    /// After how many seconds a slot that nobody reads is given up; 0 is never, and before PostgreSQL 18.
    slot_timeout: i64,
}

impl Facts {
    async fn ask(session: &SqlSession) -> Result<Facts, SourceFailure> {
        let statement = "
            SELECT quote_ident(current_user), r.rolsuper,
                   r.rolreplication OR EXISTS (SELECT FROM pg_roles rds
                       WHERE rds.rolname = 'rds_replication' AND pg_has_role(r.oid, rds.oid, 'USAGE')),
                   quote_ident(current_database()), has_database_privilege(current_database(), 'CREATE'),
                   quote_ident(current_schema()), coalesce(has_schema_privilege(current_schema(), 'CREATE'), false),
                   pg_is_in_recovery(), current_setting('wal_level'),
                   (SELECT count(*) FROM pg_replication_slots), current_setting('max_replication_slots')::int,
                   (SELECT count(*) FROM pg_stat_get_wal_senders()), current_setting('max_wal_senders')::int,
                   (SELECT setting::bigint FROM pg_settings WHERE name = 'max_slot_wal_keep_size'),
                   coalesce((SELECT CASE unit WHEN 'min' THEN 60 ELSE 1 END * setting::bigint FROM pg_settings
                             WHERE name = 'idle_replication_slot_timeout'), 0)
            FROM pg_roles r WHERE r.rolname = current_user";
        let row = session.query_one(statement, &[]).await.map_err(|error| session.classify(&error))?;
        Ok(Facts {
            role: row.get(0),
            superuser: row.get(1),
            replication: row.get(2),
            database: row.get(3),
            creates_in_database: row.get(4),
            schema: row.get(5),
            creates_in_schema: row.get(6),
            standby: row.get(7),
            wal_level: row.get(8),
            slots: (row.get(9), row.get(10)),
            walsenders: (row.get(11), row.get(12)),
            wal_keep: row.get(13),
            slot_timeout: row.get(14),
        })
    }
}

/// Opens a replication connection, which a pooler, a role or a full server may refuse; who the server is, either way.
async fn replication(
    report: &mut Report,
    info: &ConnInfo,
    session: &SqlSession,
    facts: &Facts,
) -> Option<SystemIdentity> {
    report.on(format!("role {}", facts.role));
    let opened = async { WalsenderConnection::connect(info).await?.identify_system().await }.await;
    let (used, most) = facts.walsenders;
    match opened {
        Ok(server) => {
            report.ok("replication", "may open a replication connection");
            report.on(session.host().to_string()).ok("max-wal-senders", format!("{used} of {most} are in use"));
            return Some(server);
        }
        // The cause, where it is known, rather than the server's refusal.
        Err(_) if !facts.replication && !facts.superuser => report.fail(
            "replication",
            format!("the role {} may not open replication connections", facts.role),
            replication_remedy(&facts.role),
        ),
        Err(_) if used >= i64::from(most) => report.fail(
            "max-wal-senders",
            format!("all walsenders are in use: max_wal_senders is {most}"),
            format!("ALTER SYSTEM SET max_wal_senders = {}; then restart the server", most + 10),
        ),
        Err(failure) => report.refused("replication", failure),
    }
    report.told("server", setup::identity(session).await)
}

fn server_settings(report: &mut Report, facts: &Facts) {
    if !facts.standby {
        report.ok("standby", "it is the primary");
    } else {
        report.fail(
            "standby",
            "this server is a standby: neither a publication nor the checkpoint can be written",
            "connect to the primary, or name all servers in SOURCE with target_session_attrs=read-write",
        );
    }
    match judge::wal_level(&facts.wal_level) {
        Some(failure) => report.refused("wal-level", failure),
        None => report.ok("wal-level", "wal_level = logical"),
    }
    if facts.slot_timeout > 0 {
        let minutes = facts.slot_timeout / 60;
        report.warn(
            "slot-timeout",
            format!(
                "idle_replication_slot_timeout is {minutes} min: if outboxd is away for longer, the server gives its slot up \
                 and the position is lost"
            ),
            "ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_reload_conf()",
        );
    }
}

fn slot_findings(
    report: &mut Report,
    settings: &PostgresSettings,
    state: Option<&SlotState>,
    info: &ConnInfo,
    facts: &Facts,
    no_standby: bool,
) {
    let name = &settings.slot;
    let (used, most) = facts.slots;
    match state {
        None if used >= i64::from(most) => report.fail(
            "max-replication-slots",
            format!("no replication slot is free: max_replication_slots is {most}"),
            format!(
                "ALTER SYSTEM SET max_replication_slots = {}; then restart the server; or drop one that nobody reads: \
                 SELECT slot_name FROM pg_replication_slots WHERE NOT active",
                most + 10
            ),
        ),
        _ => report.ok("max-replication-slots", format!("{used} of {most} are in use")),
    }
    report.on(format!("slot {name}"));
    let wrong = judge::slot(settings, state, info.dbname());
    let foreign = wrong.is_some();
    match (wrong, state) {
        (Some(failure), _) => report.refused("slot", failure),
        (None, None) => report.ok("slot", format!("slot `{name}` does not exist yet; a run creates it")),
        (None, Some(state)) => match state.active_pid {
            Some(pid) if no_standby => report.fail(
                "slot",
                format!("slot `{name}` is being read by process {pid}, and --no-standby forbids waiting for it"),
                "stop the other instance, or run without --no-standby",
            ),
            Some(pid) => report.warn(
                "slot",
                format!("slot `{name}` is being read by process {pid}: a run stands by until that ends"),
                format!("see who it is: SELECT * FROM pg_stat_activity WHERE pid = {pid}"),
            ),
            None => {
                let confirmed = state.confirmed.map_or_else(|| "nothing".to_owned(), |lsn| lsn.to_string());
                let retained = figures::bytes(state.retained_bytes());
                let seen =
                    format!("exists, read by nobody, confirmed up to {confirmed}, {retained} of log kept for it");
                report.ok("slot", seen);
            }
        },
    }
    if !foreign {
        retention(report, name, state, facts);
    }
}

/// Whether the log kept for the slot may be too much for the server, or too little for us.
fn retention(report: &mut Report, name: &str, state: Option<&SlotState>, facts: &Facts) {
    const CHECK: &str = "wal-retention";
    let living = state.filter(|state| state.lost().is_none());
    let retained = living.map_or(0, SlotState::retained_bytes);
    if retained > MUCH_RETAINED {
        report.warn(
            CHECK,
            format!("the server keeps {} MiB of log for slot `{name}`", retained >> 20),
            "start outboxd so that it catches up, and watch outboxd_slot_retained_bytes",
        );
    }
    let endangered = living.is_some_and(|state| matches!(state.wal_status.as_deref(), Some("unreserved")));
    let room = living.and_then(SlotState::narrow);
    if endangered || room.is_some() {
        let left = room.map_or(0, |room| room.max(0) >> 20);
        report.warn(
            CHECK,
            format!(
                "slot `{name}` is close to max_slot_wal_keep_size ({} MB): after {left} MiB more of log the server drops \
                 what the slot needs and the position is lost",
                facts.wal_keep
            ),
            "ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'; SELECT pg_reload_conf()",
        );
    } else if facts.wal_keep < 0 {
        report.warn(
            CHECK,
            "max_slot_wal_keep_size is -1: while outboxd is away the log kept for its slot may fill the server's disk",
            "ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'; SELECT pg_reload_conf(); a slot that falls further behind \
             is then lost (exit 4), so choose what an outage may take",
        );
    } else if retained <= MUCH_RETAINED {
        report.ok(CHECK, format!("max_slot_wal_keep_size is {} MB", facts.wal_keep));
    }
}

/// The checkpoint row, if it could be looked for.
async fn checkpoint_findings(
    report: &mut Report,
    settings: &PostgresSettings,
    pipeline: &str,
    session: &SqlSession,
    facts: &Facts,
) -> Option<Option<Checkpoint>> {
    const CHECK: &str = "checkpoint";
    report.on("table outboxd_checkpoint");
    let exists = report.told(CHECK, checkpoint::table_exists(session).await)?;
    if let Some(failure) = judge::checkpoint_table(exists, settings) {
        report.refused(CHECK, failure);
        return Some(None);
    }
    let role = &facts.role;
    if !exists {
        match &facts.schema {
            Some(schema) if facts.creates_in_schema => {
                report.ok(CHECK, format!("outboxd_checkpoint does not exist yet; a run creates it in {schema}"));
            }
            Some(schema) => report.fail(
                CHECK,
                format!("outboxd_checkpoint does not exist and {role} may not create tables in schema {schema}"),
                format!("GRANT CREATE ON SCHEMA {schema} TO {role}; or {}", checkpoint::CREATE_ELSEWHERE),
            ),
            None => report.fail(
                CHECK,
                format!("outboxd_checkpoint does not exist and no schema of {role}'s search_path does"),
                format!("ALTER ROLE {role} SET search_path = public; or {}", checkpoint::CREATE_ELSEWHERE),
            ),
        }
        return Some(None);
    }
    let allowed = session
        .query_one(
            "SELECT coalesce(string_agg(privilege, ', ' ORDER BY nr), '') FROM
                 (VALUES (1, 'SELECT'), (2, 'INSERT'), (3, 'UPDATE')) AS needed (nr, privilege)
             WHERE NOT has_table_privilege('outboxd_checkpoint', privilege)",
            &[],
        )
        .await
        .map(|row| row.get::<_, String>(0))
        .map_err(|error| session.classify(&error));
    let lacking = report.told(CHECK, allowed)?;
    if !lacking.is_empty() {
        report.fail(
            CHECK,
            format!("{role} lacks {lacking} on outboxd_checkpoint"),
            format!("GRANT SELECT, INSERT, UPDATE ON outboxd_checkpoint TO {role}"),
        );
        if lacking.contains("SELECT") {
            return None;
        }
    }
    let stored = report.told(CHECK, checkpoint::load(session, pipeline).await)?;
    if lacking.is_empty() {
        report.ok(CHECK, "outboxd_checkpoint can be read and written");
    }
    Some(stored)
}

/// The notes on the publishers, where there are several.
async fn publishers_findings(
    report: &mut Report,
    settings: &PostgresSettings,
    session: &SqlSession,
    facts: &Facts,
) -> Option<()> {
    const CHECK: &str = "publishers";
    report.on("table outboxd_publishers");
    const MAKE: &str = "run `outboxd init` once as a role that may create tables, or sql/postgres/publishers.sql";
    let role = &facts.role;
    match report.told(CHECK, notes::lacking(session).await)? {
        Some(lacking) if lacking.is_empty() => report.ok(CHECK, "outboxd_publishers can be read and written"),
        Some(lacking) => report.fail(
            CHECK,
            format!("{role} lacks {lacking} on outboxd_publishers"),
            format!("GRANT SELECT, INSERT, UPDATE ON outboxd_publishers TO {role}"),
        ),
        None if settings.no_create || !facts.creates_in_schema => {
            report.fail(
                CHECK,
                format!("outboxd_publishers does not exist and {role} may not, or shall not, create it"),
                MAKE,
            );
        }
        None => report.ok(CHECK, "outboxd_publishers does not exist yet; a run creates it"),
    }
    Some(())
}

fn position(report: &mut Report, stored: Option<&Checkpoint>, state: Option<&SlotState>) {
    let confirmed = state.and_then(|state| state.confirmed);
    match confirmed.max(stored.map(|stored| stored.position)) {
        Some(position) => report.ok("position", format!("a run goes on from {position}")),
        None => report.ok("position", "none is stored; a run begins with what is committed after its slot was made"),
    }
}

/// What a run does not refuse: one that it will make, or one that is good enough.
async fn publication_findings(
    report: &mut Report,
    settings: &PostgresSettings,
    found: Option<&PublicationState>,
    tables: &Tables,
    session: &SqlSession,
    facts: &Facts,
) {
    const CHECK: &str = "publication";
    let name = &settings.publication;
    if let Some(found) = found {
        let split = tables.catalog.iter().filter(|table| table.partitioned && !found.via_root);
        let split: Vec<_> = split.map(CatalogTable::quoted).collect();
        if split.is_empty() {
            report.ok(CHECK, format!("publication `{name}` has all that is needed"));
        } else {
            report.warn(
                CHECK,
                format!(
                    "publication `{name}` names the partitions of {} instead of the table: rows of a partition that is \
                     dropped before they are read stop the pipeline",
                    split.join(", ")
                ),
                format!("ALTER PUBLICATION {} SET (publish_via_partition_root = true)", quote(name)),
            );
        }
        return;
    }
    let create = slot::create_publication(name, tables.catalog.iter().map(CatalogTable::quoted));
    let mut lacking = Vec::new();
    if !facts.creates_in_database {
        lacking.push(format!("has no CREATE on database {}", facts.database));
    }
    for table in &tables.catalog {
        let owns = session
            .query_one("SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = $1", &[&table.oid])
            .await
            .map(|row| row.get::<_, bool>(0))
            .map_err(|error| session.classify(&error));
        let Some(owns) = report.told(CHECK, owns) else { return };
        if !owns && !facts.superuser {
            lacking.push(format!("does not own {}", table.quoted()));
        }
    }
    if lacking.is_empty() {
        report.ok(CHECK, format!("publication `{name}` does not exist yet; a run creates it"));
    } else {
        let why = lacking.join(" and ");
        let what = format!("publication `{name}` does not exist and {} cannot create it: it {why}", facts.role);
        report.fail(CHECK, what, setup::publication_by_owner(&create));
    }
}

/// Why the rows that are in the table cannot be read, and what helps; nothing when they can.
async fn readable(
    session: &SqlSession,
    table: &CatalogTable,
    projection: &Projection,
    facts: &Facts,
) -> Result<Option<(String, String)>, SourceFailure> {
    let (outbox, role) = (table.quoted(), &facts.role);
    let wanted: Vec<_> = projection.columns().map(|(_, name, _)| name).filter(|name| table.has(name)).collect();
    let row = session
        .query_one(
            "SELECT coalesce(bool_and(has_column_privilege($1::oid, name, 'SELECT')), true), row_security_active($1::oid)
             FROM unnest($2::text[]) AS name",
            &[&table.oid, &wanted],
        )
        .await
        .map_err(|error| session.classify(&error))?;
    if !row.get::<_, bool>(0) {
        let what = format!("{role} may not read {outbox}, which --snapshot existing does");
        return Ok(Some((what, format!("GRANT SELECT ON {outbox} TO {role}"))));
    }
    if row.get::<_, bool>(1) {
        let what = format!("row security hides rows of {outbox} from {role}, so the snapshot would be incomplete");
        return Ok(Some((what, format!("ALTER ROLE {role} BYPASSRLS"))));
    }
    Ok(None)
}
