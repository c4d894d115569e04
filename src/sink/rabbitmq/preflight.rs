//! Looks whether RabbitMQ lets us in, has the exchange and lets us write to it. Nothing is declared or published.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lapin::options::ExchangeUnbindOptions;
use lapin::types::FieldTable;
use lapin::{Connection, Error};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::link::{Target, code, declare_on, exchange_remedy, told};
use super::short;
use crate::config::RabbitSettings;
use crate::preflight::{Finding, Protection, Report, is_local};
use crate::sink::SinkFailure;
use crate::sink::lanes::Refusal;

const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of a greeting at the most.
const MOST_GREETING: u32 = 64 * 1024;
const REACH: &str = "make sure that RabbitMQ runs and that host and port in --sink lead to it from here";

pub async fn preflight(settings: &RabbitSettings) -> Vec<Finding> {
    let mut report = Report::about("SINK");
    let target = match Target::of(settings) {
        Ok(target) => target,
        Err(failure) => {
            refused(&mut report, failure);
            return report.into_findings();
        }
    };
    report.on(target.address());
    let looking = look(&target, settings, &mut report);
    if tokio::time::timeout(PATIENCE, looking).await.is_err() {
        report.fail("sink", format!("{}: RabbitMQ did not answer in time", target.address()), REACH);
    }
    report.into_findings()
}

fn refused(report: &mut Report, failure: SinkFailure) {
    match failure {
        SinkFailure::NotReady { what, remedy } => report.fail("sink", what, remedy),
        other => report.fail("sink", other.to_string(), REACH),
    }
}

async fn look(target: &Target, settings: &RabbitSettings, report: &mut Report) {
    let connection = match target.connect(Arc::new(OnceLock::new())).await {
        Ok(connection) => connection,
        Err(error) => {
            match target.refusal(&error, false) {
                Refusal::Halt(failure) => refused(report, failure),
                _ => report.fail("sink", format!("{}: {}", target.address(), told(&error)), REACH),
            }
            return;
        }
    };
    let (user, vhost) = (&target.uri.authority.userinfo.username, &target.uri.vhost);
    let version = version(target).await.unwrap_or_else(|| "of an unknown version".to_owned());
    report.ok("sink", format!("RabbitMQ {version} lets `{user}` into the vhost `{vhost}`"));
    let seen = if target.tls.is_some() { Protection::Verified("amqps") } else { Protection::Plain("amqp") };
    let remedy = "set --sink to an amqps:// URL, with --amqp-ca for an authority of your own";
    report.tls(seen, is_local(&target.uri.authority.host), remedy);
    report.on(format!("exchange {}", settings.exchange));
    if settings.exchange.is_empty() {
        report.ok("exchange", "the default exchange leads to the queue that the routing key names");
        return;
    }
    exchange(&connection, settings, report).await;
}

async fn exchange(connection: &Connection, settings: &RabbitSettings, report: &mut Report) {
    let name = &settings.exchange;
    // What it refuses closes the channel, so each question has its own.
    let passive = ask(connection, async |channel| declare_on(&channel, settings, true).await).await;
    match passive {
        Ok(()) => {}
        Err(error) if code(&error) == Some(404) && settings.declare => {
            report.ok("exchange", format!("`{name}` is not there yet: a run declares it"));
            report.warn(
                "bindings",
                format!("no queue is bound to `{name}`, and what reaches no queue is gone"),
                "declare the exchange and bind queues to it before the first run, or set --amqp-mandatory",
            );
            return;
        }
        Err(error) => {
            let remedy = exchange_remedy(&error, settings).unwrap_or_else(|| REACH.to_owned());
            report.fail("exchange", told(&error), remedy);
            return;
        }
    }
    // It is there, so this declares nothing: it only compares.
    let same = match settings.declare {
        true => ask(connection, async |channel| declare_on(&channel, settings, false).await).await,
        false => Ok(()),
    };
    match same {
        Ok(()) if settings.declare => report.ok("exchange", format!("`{name}` is a durable topic exchange")),
        Ok(()) => report.ok("exchange", format!("`{name}` is there")),
        Err(error) => {
            let remedy = exchange_remedy(&error, settings).unwrap_or_else(|| REACH.to_owned());
            report.fail("exchange", told(&error), remedy);
        }
    }
    // Taking away a binding that is not there changes nothing, and needs the permission to write to its destination.
    let nowhere = short("outboxd-check-no-such-exchange");
    let unbound = ask(connection, async |channel| {
        let (key, options) = (short("outboxd-check"), ExchangeUnbindOptions::default());
        channel.exchange_unbind(short(name), nowhere.clone(), key, options, FieldTable::default()).await
    })
    .await;
    match unbound {
        Err(error) if code(&error) == Some(403) && told(&error).contains("write access") => report.fail(
            "permission",
            told(&error),
            format!("grant the user write permission on the exchange `{name}` (rabbitmqctl set_permissions)"),
        ),
        _ => report.ok("permission", format!("`{name}` may be written to")),
    }
}

/// What the server says of itself in the frame with which it answers the protocol's header. lapin keeps it to itself.
async fn version(target: &Target) -> Option<String> {
    let authority = &target.uri.authority;
    let stream = TcpStream::connect((authority.host.as_str(), authority.port)).await.ok()?;
    let Some(tls) = &target.tls else { return greeting(stream).await };
    let name = ServerName::try_from(authority.host.clone()).ok()?;
    greeting(TlsConnector::from(tls.clone()).connect(name, stream).await.ok()?).await
}

async fn greeting(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> Option<String> {
    stream.write_all(b"AMQP\x00\x00\x09\x01").await.ok()?;
    stream.flush().await.ok()?;
    // Type, channel, length.
    let mut head = [0; 7];
    stream.read_exact(&mut head).await.ok()?;
    let length = u32::from_be_bytes([head[3], head[4], head[5], head[6]]);
    let mut start = vec![0; length.min(MOST_GREETING) as usize];
    stream.read_exact(&mut start).await.ok()?;
    version_in(&start)
}

/// The field `version` of the table of properties: its name, an S for a string, its length, itself.
fn version_in(start: &[u8]) -> Option<String> {
    const FIELD: &[u8] = b"\x07versionS";
    let at = start.windows(FIELD.len()).position(|bytes| bytes == FIELD)? + FIELD.len();
    let (length, text) = start.get(at..)?.split_first_chunk::<4>()?;
    let text = text.get(..u32::from_be_bytes(*length) as usize)?;
    String::from_utf8(text.to_vec()).ok()
}

/// One question on a channel of its own.
async fn ask(
    connection: &Connection,
    question: impl AsyncFn(lapin::Channel) -> Result<(), Error>,
) -> Result<(), Error> {
    let channel = connection.create_channel().await?;
    question(channel).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_found_in_the_greeting() {
        let start = b"\x00\x0a\x00\x0a\x00\x09\x00\x00\x00\x13\x07versionS\x00\x00\x00\x054.3.1\x00\x00\x00\x05PLAIN";
        assert_eq!(version_in(start).as_deref(), Some("4.3.1"));
        assert_eq!(version_in(&start[..20]), None);
        assert_eq!(version_in(b""), None);
    }
}
