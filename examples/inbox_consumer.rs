//! A consumer whose events have their effect once, however often they come: it keeps the balance of each account in
//! PostgreSQL.
//!
//! ```console
//! $ cargo run --example inbox_consumer --features inbox -- kafka:9092 accounts.events billing postgres://app@db/billing
//! ```
//!
//! An event is `{"account": "a-17", "amount": 250}`. Adding an amount twice would be wrong, so this is what a consumer has
//! to get right: the inbox and the balance are changed by one transaction, and the offset is committed behind it. When
//! anything fails the program ends; started again it goes on after the last committed offset, and the inbox knows which of
//! the events that come again were processed.

use anyhow::{Context as _, Result};
use outboxd::inbox::rdkafka::ClientConfig;
use outboxd::inbox::rdkafka::consumer::{CommitMode, Consumer as _, StreamConsumer};
use outboxd::inbox::rdkafka::message::Message;
use outboxd::inbox::tokio_postgres::{self, Client, NoTls, Transaction};
use outboxd::inbox::{Accepted, Event, Inbox, POSTGRES_SCHEMA};

const BALANCES: &str = "CREATE TABLE IF NOT EXISTS balances (account text PRIMARY KEY, balance bigint NOT NULL)";

#[derive(serde::Deserialize)]
struct Booking {
    account: String,
    amount: i64,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [brokers, topic, group, database] = &arguments[..] else {
        anyhow::bail!("usage: inbox_consumer BROKERS TOPIC GROUP DATABASE_URL");
    };
    consume(brokers, topic, group, database).await
}

/// Processes events until something fails.
pub async fn consume(brokers: &str, topic: &str, group: &str, database: &str) -> Result<()> {
    let (mut client, connection) = tokio_postgres::connect(database, NoTls).await.context("connecting")?;
    tokio::spawn(connection);
    // In earnest these are migrations. Two programs that make a table in the same moment are in each other's way.
    let alone = "SELECT pg_advisory_xact_lock(7420)";
    client.batch_execute(&format!("BEGIN; {alone}; {POSTGRES_SCHEMA}; {BALANCES}; COMMIT")).await?;

    let consumer: StreamConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", group)
        .set("auto.offset.reset", "earliest")
        // The offset of an event is committed when its effect is, not when the event was read.
        .set("enable.auto.commit", "false")
        .create()?;
    consumer.subscribe(&[topic])?;
    let inbox = Inbox::new(group);
    loop {
        let message = consumer.recv().await?;
        let accepted = process(&inbox, &mut client, &message).await?;
        // An offset that is lost on its way costs nothing: the event comes again, and is known.
        consumer.commit_message(&message, CommitMode::Async)?;
        println!("{accepted:?}");
    }
}

/// One event, in one transaction.
pub async fn process(inbox: &Inbox, client: &mut Client, message: &impl Message) -> Result<Accepted> {
    let event = Event::from_message(message)?;
    let transaction = client.transaction().await?;
    let accepted = inbox.accept(&transaction, &event).await?;
    if accepted == Accepted::New {
        book(&transaction, message.payload().unwrap_or_default()).await?;
    }
    // What returned before this line was rolled back.
    transaction.commit().await?;
    Ok(accepted)
}

async fn book(transaction: &Transaction<'_>, payload: &[u8]) -> Result<()> {
    let Booking { account, amount } = serde_json::from_slice(payload).context("an event that is no booking")?;
    let add = "INSERT INTO balances (account, balance) VALUES ($1, $2)
               ON CONFLICT (account) DO UPDATE SET balance = balances.balance + excluded.balance";
    transaction.execute(add, &[&account, &amount]).await?;
    Ok(())
}
