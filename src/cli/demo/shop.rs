//! The shop's database, whichever it is: what the play needs of it, and the words in which it is spoken of.

use super::ledger::Event;
use super::mysql::{self, MySql};
use super::mysql_program::ServerProgram;
use super::postgres::{self, Postgres};
use super::programs::Programs;
use super::report::{Stage, count};
use super::scratch::{Account, Scratch};
use super::workload::Outcome;
use crate::cli::{DemoArgs, DemoSource};
use crate::failure::{ExitCode, Halt};
use crate::source::mysql::session::Flavor;

pub fn name(source: DemoSource) -> &'static str {
    match source {
        DemoSource::Postgres => "PostgreSQL",
        DemoSource::Mysql => "MySQL",
        DemoSource::Mariadb => "MariaDB",
    }
}

/// How far the confirmed position is from the end of the log.
#[derive(Clone, Debug, Default)]
pub struct Standing {
    /// Empty while there is none.
    pub confirmed: String,
    pub end: String,
    pub behind: u64,
}

impl Standing {
    pub fn is_caught_up(&self) -> bool {
        self.behind == 0 && !self.confirmed.is_empty()
    }
}

pub enum Shop {
    Postgres(Postgres),
    MySql(MySql),
}

impl Shop {
    /// Finds the programs and starts a server. To be called on the main thread: see [`tie`](super::scratch::tie).
    pub async fn open(args: &DemoArgs, account: &Account, scratch: &Scratch, stage: &Stage) -> Result<Shop, Halt> {
        let misplaced = |flag: &str, right: &str| Halt {
            code: ExitCode::Usage,
            what: format!("{flag} says nothing about {}", name(args.source)),
            remedy: format!("name its programs with {right}, or leave it out"),
        };
        let flavor = match args.source {
            DemoSource::Postgres if args.server_program.is_some() => {
                return Err(misplaced("--server-program", "--postgres-bin"));
            }
            DemoSource::Postgres => {
                let programs = Programs::find(args.postgres_bin.as_deref(), account, stage).await?;
                return Ok(Shop::Postgres(Postgres::start(&programs, account, scratch, stage).await?));
            }
            DemoSource::Mysql => Flavor::MySql,
            DemoSource::Mariadb => Flavor::MariaDb,
        };
        if args.postgres_bin.is_some() {
            return Err(misplaced("--postgres-bin", "--server-program"));
        }
        let program = ServerProgram::find(flavor, args.server_program.as_deref(), account)?;
        Ok(Shop::MySql(MySql::start(&program, account, scratch, stage).await?))
    }

    pub fn name(&self) -> &'static str {
        match self {
            Shop::Postgres(_) => name(DemoSource::Postgres),
            Shop::MySql(mysql) => match mysql.flavor() {
                Flavor::MySql => name(DemoSource::Mysql),
                Flavor::MariaDb => name(DemoSource::Mariadb),
            },
        }
    }

    pub fn version(&self) -> &str {
        match self {
            Shop::Postgres(postgres) => postgres.version(),
            Shop::MySql(mysql) => mysql.version(),
        }
    }

    /// The address without the password.
    pub fn url(&self) -> String {
        match self {
            Shop::Postgres(postgres) => postgres.url(),
            Shop::MySql(mysql) => mysql.url(),
        }
    }

    pub fn password(&self) -> &str {
        match self {
            Shop::Postgres(postgres) => postgres.password(),
            Shop::MySql(mysql) => mysql.password(),
        }
    }

    /// Where the relay and the database's own client look for the password.
    pub fn password_variable(&self) -> &'static str {
        match self {
            Shop::Postgres(_) => "PGPASSWORD",
            Shop::MySql(_) => "MYSQL_PWD",
        }
    }

    /// The database's own client, and how it is told where to go.
    pub fn client(&self) -> (&'static str, String) {
        match self {
            Shop::Postgres(postgres) => ("psql", postgres.url()),
            Shop::MySql(mysql) => mysql.client(),
        }
    }

    pub fn made_by_relay(&self) -> &'static str {
        match self {
            Shop::Postgres(_) => "publication and slot",
            Shop::MySql(_) => "the checkpoint",
        }
    }

    /// What is confirmed.
    pub fn mark(&self) -> &'static str {
        match self {
            Shop::Postgres(_) => "slot",
            Shop::MySql(_) => "position",
        }
    }

    pub fn behind(&self, standing: &Standing) -> String {
        let unit = match self {
            Shop::Postgres(_) => "byte",
            Shop::MySql(_) => "transaction",
        };
        format!("{} behind", count(usize::try_from(standing.behind).unwrap_or(usize::MAX), unit))
    }

    /// What lies after the confirmed position and is never confirmed.
    pub fn not_counted(&self) -> Option<&'static str> {
        match self {
            Shop::Postgres(_) => None,
            Shop::MySql(_) => Some("not counting those that store it"),
        }
    }

    pub async fn admit(&self, customers: &[&str]) -> Result<(), Halt> {
        match self {
            Shop::Postgres(postgres) => postgres.admit(customers).await,
            Shop::MySql(mysql) => mysql.admit(customers).await,
        }
    }

    pub async fn till(&self) -> Result<Till, Halt> {
        Ok(match self {
            Shop::Postgres(postgres) => Till::Postgres(postgres.till().await?),
            Shop::MySql(mysql) => Till::MySql(mysql.till().await?),
        })
    }

    pub async fn watch(&self) -> Result<Watch, Halt> {
        Ok(match self {
            Shop::Postgres(postgres) => Watch::Postgres(postgres.watch().await?),
            Shop::MySql(mysql) => Watch::MySql(mysql.watch().await?),
        })
    }
}

/// Where one writer's orders are taken.
pub enum Till {
    Postgres(postgres::Till),
    MySql(mysql::Till),
}

impl Till {
    /// BEGIN, COMMIT and their like, which every database spells the same.
    pub async fn execute(&mut self, statement: &str) -> Result<(), Halt> {
        match self {
            Till::Postgres(till) => till.execute(statement).await,
            Till::MySql(till) => till.execute(statement).await,
        }
    }

    /// Inserts an order; its number.
    pub async fn order(&mut self, customer: &str, item: &str, amount: i32) -> Result<i64, Halt> {
        match self {
            Till::Postgres(till) => till.order(customer, item, amount).await,
            Till::MySql(till) => till.order(customer, item, amount).await,
        }
    }

    /// Inserts an event of the order into the outbox, with the next number of its customer.
    pub async fn event(&mut self, order: &Outcome, step: &str) -> Result<Event, Halt> {
        match self {
            Till::Postgres(till) => till.event(order, step).await,
            Till::MySql(till) => till.event(order, step).await,
        }
    }
}

/// Looks at what the relay has confirmed, where the database knows it.
pub enum Watch {
    Postgres(postgres::SlotWatch),
    MySql(mysql::CheckpointWatch),
}

impl Watch {
    pub async fn look(&mut self) -> Result<Standing, Halt> {
        match self {
            Watch::Postgres(watch) => watch.look().await,
            Watch::MySql(watch) => watch.look().await,
        }
    }
}
