//! What the user may do, and the statement that allows the rest.
//!
//! The server itself is asked, by preparing a statement that is never executed: it looks at rights before anything else,
//! and counts those that come through a role, a pattern of names or single columns, which `SHOW GRANTS` leaves to the
//! reader.

use super::server_error::WireError;
use super::session::{Session, literal, quote};
use crate::source::SourceFailure;

/// The user has no right to anything in the database.
pub const NO_RIGHT_TO_DATABASE: u16 = 1044;

/// A right on one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    Create,
    Select,
    Insert,
    Update,
    Delete,
}

impl Right {
    pub fn name(self) -> &'static str {
        match self {
            Right::Create => "CREATE",
            Right::Select => "SELECT",
            Right::Insert => "INSERT",
            Right::Update => "UPDATE",
            Right::Delete => "DELETE",
        }
    }

    /// A statement that takes this right and no other. Columns are those of the checkpoint.
    fn statement(self, table: &str) -> String {
        match self {
            Right::Create => format!("CREATE TABLE {table} (pipeline INT)"),
            Right::Select => format!("SELECT 1 FROM {table}"),
            Right::Insert => format!("INSERT INTO {table} (pipeline) VALUES ('')"),
            Right::Update => format!("UPDATE {table} SET position = ''"),
            // The condition is none, so that no right to read is asked for.
            Right::Delete => format!("DELETE FROM {table} LIMIT 1"),
        }
    }
}

/// The account that the server took us for, as `GRANT` wants it.
pub async fn account(session: &mut Session) -> Result<String, SourceFailure> {
    let account = session.query_one("SELECT CURRENT_USER()").await?.string(0);
    let (user, host) = account.rsplit_once('@').unwrap_or((&account, "%"));
    Ok(format!("{}@{}", quote(user), quote(host)))
}

/// Those of the rights that the user does not have. `table` is quoted, and need not exist.
pub async fn lacking(session: &mut Session, table: &str, rights: &[Right]) -> Result<Vec<Right>, SourceFailure> {
    const DENIED: [u16; 3] = [NO_RIGHT_TO_DATABASE, 1142, 1143];
    let mut lacking = Vec::new();
    for right in rights {
        session.execute(&format!("SET @outboxd = {}", literal(&right.statement(table)))).await?;
        match session.try_query("PREPARE outboxd_right FROM @outboxd").await {
            Err(WireError::Server { code, .. }) if DENIED.contains(&code) => lacking.push(*right),
            // Whatever else is wrong with the statement, the table's absence for one, was found after the rights.
            Ok(_) | Err(WireError::Server { .. }) => {}
            Err(error) => return Err(session.classify(error)),
        }
    }
    Ok(lacking)
}

/// `SELECT, INSERT`.
pub fn list(rights: &[Right]) -> String {
    rights.iter().map(|right| right.name()).collect::<Vec<_>>().join(", ")
}
