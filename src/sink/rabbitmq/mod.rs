//! The RabbitMQ sink: batches of persistent messages, confirmed together, one under way in each lane.
//!
//! ```text
//!   lane ── batch ──▶ an idle channel of the one connection ── publish, publish, … ──▶ exchange
//!        ◀── next ─── once every message has its confirmation ◀──── ack, ack, … ─────
//! ```
//!
//! A lane has a channel to itself while its batch is under way: what RabbitMQ refuses closes the channel it came by, and
//! so no other lane's.
//!
//! What the answers mean:
//!
//! ```text
//!   ack of all                         delivered
//!   nack                               later: a queue is full, or has lost its leader
//!   ack after a return (mandatory)     refused, and just that record: tried again alone, then parked
//!   channel closed, 406                refused: larger than max_message_size
//!   channel closed, 403                not ours to write to: exit 5, unless something was delivered before; of one
//!                                      routing key only, refused
//!   channel closed, 404                the exchange is gone, and its bindings with it: exit 5
//!   connection lost                    later; whether it arrived is unknown, so it may arrive twice
//!   connection blocked                 nothing: the messages wait in their order, with the lane and in the end the window
//! ```

mod link;
mod message;
mod preflight;

use std::collections::HashMap;
use std::future::{Future as _, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

use lapin::message::BasicReturnMessage;
use lapin::options::BasicPublishOptions;
use lapin::types::ShortString;
use lapin::{Channel, ChannelState, Confirmation, Error, ErrorKind};

use super::SinkFailure;
use super::lanes::{Courier, Parcel, Refusal};
use crate::config::RabbitSettings;
pub use link::Link;
use link::{code, not_ready, told};
use message::Message;
pub use preflight::preflight;

/// How often a wait for confirmations looks whether there is still a channel that they could come by.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// How long a start waits for RabbitMQ before that is told as trouble, and begun again.
const READY_PATIENCE: Duration = Duration::from_secs(5);

/// Whether RabbitMQ has ever taken something: after that, trouble with permissions is taken to pass.
pub type RabbitMemory = AtomicBool;

pub struct RabbitCourier {
    link: Arc<Link>,
    settings: RabbitSettings,
    delivered: Arc<RabbitMemory>,
}

impl RabbitCourier {
    pub fn new(settings: &RabbitSettings, link: &Arc<Link>, delivered: &Arc<RabbitMemory>) -> Self {
        RabbitCourier { link: link.clone(), settings: settings.clone(), delivered: delivered.clone() }
    }

    /// Publishes in turn, then waits for all confirmations. What was returned, if everything was confirmed.
    async fn publish(&self, channel: &Channel, messages: &[Message<'_>]) -> Result<Vec<BasicReturnMessage>, Refusal> {
        let exchange = short(&self.settings.exchange);
        let options = BasicPublishOptions { mandatory: self.settings.mandatory, immediate: false };
        let mut publishing = Vec::with_capacity(messages.len());
        for message in messages {
            let (key, properties) = (short(message.routing_key), message.properties.clone());
            let mut publish = Box::pin(channel.basic_publish(exchange.clone(), key, options, message.body, properties));
            // The first poll puts the message into the connection's queue; only then comes the next one's turn.
            publishing.push(match poll_fn(|context| Poll::Ready(publish.as_mut().poll(context))).await {
                Poll::Ready(published) => Err(published),
                Poll::Pending => Ok(publish),
            });
        }
        let (mut refused, mut returned, mut failure) = (0, Vec::new(), None);
        for publish in publishing {
            let confirmed = async {
                let confirmation = match publish {
                    Ok(publish) => publish.await?,
                    Err(published) => published?,
                };
                confirmation.await
            };
            match while_open(channel, confirmed).await {
                Ok(Confirmation::Ack(None)) => {}
                // It comes with any confirmation of the channel, not with its own.
                Ok(Confirmation::Ack(Some(message))) => returned.push(message),
                Ok(Confirmation::Nack(_) | Confirmation::NotRequested) => refused += 1,
                // What closed the channel says more than that it is closed.
                Err(error) if failure.is_none() || code(&error).is_some() => failure = Some(error),
                Err(_) => {}
            }
        }
        match failure {
            Some(error) => Err(self.refusal(&error)),
            None if refused > 0 => Err(Refusal::Later {
                why: format!("RabbitMQ did not take {refused} of {} records (nack)", messages.len()),
                after: None,
            }),
            None => Ok(returned),
        }
    }

    /// What the end of a channel means for the batch that was under way on it.
    fn refusal(&self, error: &Error) -> Refusal {
        let exchange = &self.settings.exchange;
        let why = told(error);
        match code(error) {
            Some(403) if why.contains("access to topic") => Refusal::Refused { why },
            Some(403) if self.delivered.load(Ordering::Acquire) => Refusal::Later { why, after: None },
            Some(403) => Refusal::Halt(not_ready(
                why,
                format!("grant the user write permission on the exchange `{exchange}` (rabbitmqctl set_permissions)"),
            )),
            Some(404) => Refusal::Halt(not_ready(
                format!("{why}: it was deleted, and its bindings with it"),
                "declare the exchange, bind the queues to it again, and start outboxd",
            )),
            Some(311 | 406) => Refusal::Refused { why },
            // It closed the whole connection, or is none of RabbitMQ's: nobody knows that this batch is to blame.
            _ => Refusal::Later { why, after: None },
        }
    }

    /// How many of the first records may be under way together.
    ///
    /// Whether a mandatory message is returned depends on its routing key. If a key's next record has another one, it must
    /// wait for the first one's fate: it would overtake it.
    fn wave(&self, batch: &[Parcel]) -> usize {
        if !self.settings.mandatory {
            return batch.len();
        }
        let mut routes: HashMap<Option<&[u8]>, &str> = HashMap::new();
        for (at, parcel) in batch.iter().enumerate() {
            let route = message::routing_key(parcel);
            if *routes.entry(parcel.key.as_deref()).or_insert(route) != route {
                return at;
            }
        }
        batch.len()
    }
}

impl Courier for RabbitCourier {
    fn together(&self, _: &Parcel, _: &Parcel) -> bool {
        true
    }

    async fn send(&self, batch: &[Parcel]) -> Result<(), Refusal> {
        let line = self.link.line().await?;
        let channel = match line.channel().await {
            Ok(channel) => channel,
            Err(error) => return Err(Refusal::Later { why: told(&error), after: None }),
        };
        let mut done = 0;
        while done < batch.len() {
            let wave = &batch[done..done + self.wave(&batch[done..])];
            let mut messages = Vec::with_capacity(wave.len());
            let mut unfit = None;
            for parcel in wave {
                match Message::of(parcel, line.frame_max()) {
                    Ok(message) => messages.push(message),
                    Err(why) => {
                        unfit = Some(why);
                        break;
                    }
                }
            }
            let published = match (messages.is_empty(), &unfit) {
                (true, Some(why)) => {
                    line.give_back(channel);
                    return Err(Refusal::Partly { tried: done + 1, refused: vec![done], why: why.clone() });
                }
                _ => self.publish(&channel, &messages).await,
            };
            match published {
                Ok(returned) if returned.is_empty() => done += messages.len(),
                Ok(returned) => {
                    line.give_back(channel);
                    let why = unroutable(&self.settings.exchange, &returned);
                    let refused = message::found(&messages, &returned).into_iter().map(|at| done + at).collect();
                    return Err(Refusal::Partly { tried: done + messages.len(), refused, why });
                }
                // The rest is sent again, and meets the same trouble or none.
                Err(Refusal::Later { why, .. } | Refusal::Refused { why }) if done > 0 => {
                    return Err(Refusal::Partly { tried: done, refused: Vec::new(), why });
                }
                Err(refusal) => return Err(refusal),
            }
        }
        self.delivered.store(true, Ordering::Release);
        line.give_back(channel);
        Ok(())
    }
}

/// Waits as long as there is a channel: a blocked connection may take hours, a lost one must not.
async fn while_open(
    channel: &Channel,
    confirmed: impl Future<Output = Result<Confirmation, Error>>,
) -> Result<Confirmation, Error> {
    tokio::pin!(confirmed);
    loop {
        match tokio::time::timeout(LOOK_AGAIN, &mut confirmed).await {
            Ok(confirmed) => return confirmed,
            Err(_) if channel.status().connected() => {}
            Err(_) => {
                return Err(ErrorKind::InvalidChannelState(ChannelState::Closed, "waiting for confirmations").into());
            }
        }
    }
}

fn unroutable(exchange: &str, returned: &[BasicReturnMessage]) -> String {
    let first = returned.first().map(|message| (message.routing_key.as_str(), message.reply_text.as_str()));
    let (key, text) = first.unwrap_or_default();
    format!("RabbitMQ returned it ({text}): no queue is bound to the exchange `{exchange}` for the routing key `{key}`")
}

/// Of a text whose length was looked at.
fn short(text: &str) -> ShortString {
    ShortString::try_new(text).unwrap_or_default()
}

impl Link {
    /// Waits a while until RabbitMQ has let us in and has the exchange.
    pub async fn ready(&self) -> Result<(), SinkFailure> {
        let mut pause = Duration::from_millis(100);
        let deadline = Instant::now() + READY_PATIENCE;
        loop {
            let why = match self.line().await {
                Ok(_) => return Ok(()),
                Err(Refusal::Halt(failure)) => return Err(failure),
                Err(Refusal::Later { why, .. } | Refusal::Refused { why } | Refusal::Partly { why, .. }) => why,
            };
            if Instant::now() + pause > deadline {
                return Err(SinkFailure::Transient { what: why });
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }
}
