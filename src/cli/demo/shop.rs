//! The shop's database, whichever it is: what the play needs of it, and the words in which it is spoken of.

use super::ledger::Event;
use super::mongodb::{self, MongoDb};
use super::mongodb_program::Mongod;
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
        DemoSource::Mongodb => "MongoDB",
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

/// Where the relay finds an address that holds a password.
const ADDRESS_VARIABLE: &str = "SHOP_URL";

pub enum Shop {
    Postgres(Postgres),
    MySql(MySql),
    MongoDb(MongoDb),
}

impl Shop {
    /// Finds the programs and starts a server. To be called on the main thread: see [`tie`](super::scratch::tie).
    pub async fn open(args: &DemoArgs, account: &Account, scratch: &Scratch, stage: &Stage) -> Result<Shop, Halt> {
        let misplaced = |flag: &str, right: &str| Halt {
            code: ExitCode::Usage,
            what: format!("{flag} says nothing about {}", name(args.source)),
            remedy: format!("name its programs with {right}, or leave it out"),
        };
        let named = args.server_program.as_deref();
        let flavor = match args.source {
            DemoSource::Postgres if named.is_some() => {
                return Err(misplaced("--server-program", "--postgres-bin"));
            }
            DemoSource::Postgres => {
                let programs = Programs::find(args.postgres_bin.as_deref(), account, stage).await?;
                return Ok(Shop::Postgres(Postgres::start(&programs, account, scratch, stage).await?));
            }
            _ if args.postgres_bin.is_some() => return Err(misplaced("--postgres-bin", "--server-program")),
            DemoSource::Mongodb => {
                let program = Mongod::find(named, account)?;
                let started = Box::pin(MongoDb::start(&program, account, scratch, stage)).await;
                return Ok(Shop::MongoDb(started?));
            }
            DemoSource::Mysql => Flavor::MySql,
            DemoSource::Mariadb => Flavor::MariaDb,
        };
        let program = ServerProgram::find(flavor, named, account)?;
        Ok(Shop::MySql(MySql::start(&program, account, scratch, stage).await?))
    }

    pub fn name(&self) -> &'static str {
        match self {
            Shop::Postgres(_) => name(DemoSource::Postgres),
            Shop::MySql(mysql) => match mysql.flavor() {
                Flavor::MySql => name(DemoSource::Mysql),
                Flavor::MariaDb => name(DemoSource::Mariadb),
            },
            Shop::MongoDb(_) => name(DemoSource::Mongodb),
        }
    }

    pub fn version(&self) -> &str {
        match self {
            Shop::Postgres(postgres) => postgres.version(),
            Shop::MySql(mysql) => mysql.version(),
            Shop::MongoDb(mongodb) => mongodb.version(),
        }
    }

    /// The address without the password.
    pub fn url(&self) -> String {
        match self {
            Shop::Postgres(postgres) => postgres.url(),
            Shop::MySql(mysql) => mysql.url(),
            Shop::MongoDb(mongodb) => mongodb.url(),
        }
    }

    /// The address as the relay is told it.
    pub fn source(&self) -> String {
        match self {
            Shop::Postgres(_) | Shop::MySql(_) => self.url(),
            // Its driver looks for a password in the address alone.
            Shop::MongoDb(_) => format!("env:{ADDRESS_VARIABLE}"),
        }
    }

    /// What is kept out of that, and the variable in which the relay looks for it.
    pub fn secret(&self) -> (&'static str, String) {
        match self {
            Shop::Postgres(postgres) => ("PGPASSWORD", postgres.password().to_owned()),
            Shop::MySql(mysql) => ("MYSQL_PWD", mysql.password().to_owned()),
            Shop::MongoDb(mongodb) => (ADDRESS_VARIABLE, mongodb.secret_url()),
        }
    }

    /// The database's own client, and the command that starts it.
    pub fn client(&self) -> (&'static str, String) {
        let (client, command) = match self {
            Shop::Postgres(postgres) => ("psql", format!("psql {}", postgres.url())),
            Shop::MySql(mysql) => mysql.client(),
            Shop::MongoDb(mongodb) => return ("mongosh", format!("mongosh '{}'", mongodb.secret_url())),
        };
        let (variable, password) = self.secret();
        (client, format!("{variable}={password} {command}"))
    }

    /// What to tell the client.
    pub fn to_try(&self) -> &'static str {
        match self {
            Shop::Postgres(_) | Shop::MySql(_) => {
                r#"INSERT INTO outbox (partition_key, payload) VALUES ('you', '{"hello": "world"}');"#
            }
            Shop::MongoDb(_) => r#"db.outbox.insertOne({partition_key: "you", payload: {hello: "world"}})"#,
        }
    }

    pub fn relay_begins_with(&self) -> &'static str {
        match self {
            Shop::Postgres(_) => "makes publication and slot",
            Shop::MySql(_) => "makes the checkpoint",
            Shop::MongoDb(_) => "takes the lease",
        }
    }

    /// What a relay waits for that comes after one that was killed.
    pub fn waited_for(&self) -> Option<&'static str> {
        match self {
            Shop::Postgres(_) | Shop::MySql(_) => None,
            Shop::MongoDb(_) => Some("the killed one's lease, which ends five seconds after its last word"),
        }
    }

    /// What is confirmed.
    pub fn mark(&self) -> &'static str {
        match self {
            Shop::Postgres(_) => "slot",
            Shop::MySql(_) | Shop::MongoDb(_) => "position",
        }
    }

    pub fn behind(&self, standing: &Standing) -> String {
        let unit = match self {
            Shop::Postgres(_) => "byte",
            Shop::MySql(_) | Shop::MongoDb(_) => "transaction",
        };
        format!("{} behind", count(usize::try_from(standing.behind).unwrap_or(usize::MAX), unit))
    }

    /// What lies after the confirmed position and is never confirmed.
    pub fn not_counted(&self) -> Option<&'static str> {
        match self {
            Shop::Postgres(_) => None,
            Shop::MySql(_) => Some("not counting those that store it"),
            Shop::MongoDb(_) => Some("not counting what stores it"),
        }
    }

    pub async fn admit(&self, customers: &[&str]) -> Result<(), Halt> {
        match self {
            Shop::Postgres(postgres) => postgres.admit(customers).await,
            Shop::MySql(mysql) => mysql.admit(customers).await,
            Shop::MongoDb(mongodb) => mongodb.admit(customers).await,
        }
    }

    pub async fn till(&self) -> Result<Till, Halt> {
        Ok(match self {
            Shop::Postgres(postgres) => Till::Postgres(postgres.till().await?),
            Shop::MySql(mysql) => Till::MySql(mysql.till().await?),
            Shop::MongoDb(mongodb) => Till::MongoDb(Box::new(mongodb.till().await?)),
        })
    }

    pub async fn watch(&self) -> Result<Watch, Halt> {
        Ok(match self {
            Shop::Postgres(postgres) => Watch::Postgres(postgres.watch().await?),
            Shop::MySql(mysql) => Watch::MySql(mysql.watch().await?),
            Shop::MongoDb(mongodb) => Watch::MongoDb(mongodb.watch()),
        })
    }
}

/// Where one writer's orders are taken.
pub enum Till {
    Postgres(postgres::Till),
    MySql(mysql::Till),
    MongoDb(Box<mongodb::Till>),
}

impl Till {
    pub async fn begin(&mut self) -> Result<(), Halt> {
        match self {
            Till::Postgres(till) => till.execute("BEGIN").await,
            Till::MySql(till) => till.execute("BEGIN").await,
            Till::MongoDb(till) => till.begin().await,
        }
    }

    pub async fn commit(&mut self) -> Result<(), Halt> {
        match self {
            Till::Postgres(till) => till.execute("COMMIT").await,
            Till::MySql(till) => till.execute("COMMIT").await,
            Till::MongoDb(till) => till.commit().await,
        }
    }

    pub async fn roll_back(&mut self) -> Result<(), Halt> {
        match self {
            Till::Postgres(till) => till.execute("ROLLBACK").await,
            Till::MySql(till) => till.execute("ROLLBACK").await,
            Till::MongoDb(till) => till.roll_back().await,
        }
    }

    /// Inserts an event and rolls back to a savepoint before it; `None` where there are no savepoints.
    pub async fn think_better_of(&mut self, order: &Outcome, step: &str) -> Result<Option<Event>, Halt> {
        const BEFORE: &str = "SAVEPOINT second_thoughts";
        const BACK: &str = "ROLLBACK TO SAVEPOINT second_thoughts";
        let event = match self {
            Till::Postgres(till) => {
                till.execute(BEFORE).await?;
                let event = till.event(order, step).await?;
                till.execute(BACK).await?;
                event
            }
            Till::MySql(till) => {
                till.execute(BEFORE).await?;
                let event = till.event(order, step).await?;
                till.execute(BACK).await?;
                event
            }
            Till::MongoDb(_) => return Ok(None),
        };
        Ok(Some(event))
    }

    /// Inserts an order; its number.
    pub async fn order(&mut self, customer: &str, item: &str, amount: i32) -> Result<i64, Halt> {
        match self {
            Till::Postgres(till) => till.order(customer, item, amount).await,
            Till::MySql(till) => till.order(customer, item, amount).await,
            Till::MongoDb(till) => till.order(customer, item, amount).await,
        }
    }

    /// Inserts an event of the order into the outbox, with the next number of its customer.
    pub async fn event(&mut self, order: &Outcome, step: &str) -> Result<Event, Halt> {
        match self {
            Till::Postgres(till) => till.event(order, step).await,
            Till::MySql(till) => till.event(order, step).await,
            Till::MongoDb(till) => till.event(order, step).await,
        }
    }
}

/// Looks at what the relay has confirmed, where the database knows it.
pub enum Watch {
    Postgres(postgres::SlotWatch),
    MySql(mysql::CheckpointWatch),
    MongoDb(mongodb::CheckpointWatch),
}

impl Watch {
    pub async fn look(&mut self) -> Result<Standing, Halt> {
        match self {
            Watch::Postgres(watch) => watch.look().await,
            Watch::MySql(watch) => watch.look().await,
            Watch::MongoDb(watch) => watch.look().await,
        }
    }
}
