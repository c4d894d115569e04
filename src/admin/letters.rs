//! Dead letters over HTTP: listed, shown with their payload, and sent again. Payloads are somebody's data, so that looking
//! at them takes what changing something takes.
//!
//! Each request opens the place by itself, and few may do so at once: nobody asks for letters every second.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, RawQuery, State as Shared};
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse as _;
use serde_json::{Value, json};

use super::answers::{Answered, failed, parameter};
use super::{Observed, Watched};
use crate::config::{DeadLetter, PublisherSettings};
use crate::dead_letters::Whose;
use crate::dead_letters::letter::Kept;
use crate::dead_letters::replay::{Outcome, Replayer};
use crate::dead_letters::store::{Store, StoreFailure};

/// How many letters a list has, unless it is said, and at the most.
const FEW: u32 = 50;
const MANY: u32 = 500;
/// How long the place may take to answer.
const PLACE_PATIENCE: Duration = Duration::from_secs(30);
/// How long an answer waits for a letter that is sent again; the sending goes on.
const REPLAY_PATIENCE: Duration = Duration::from_secs(60);
/// How much of a payload is shown: `outboxd dlq show` has it whole.
const LARGEST_VALUE: usize = 1 << 20;

type Passed = (Path<(String, String)>, RawQuery, HeaderMap);

pub async fn list(
    Shared(observed): Shared<Arc<Observed>>,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Answered {
    observed.guard.check(&headers).map_err(|refusal| refusal.into_response())?;
    let watched = find(&observed, &name)?;
    let limit = match parameter(query.as_deref(), "limit") {
        None => FEW,
        Some(text) => match text.parse::<u32>() {
            Ok(limit @ 1..=MANY) => limit,
            _ => return Err(failed(StatusCode::BAD_REQUEST, format!("limit is a number from 1 to {MANY}"))),
        },
    };
    let chosen = match parameter(query.as_deref(), "publisher") {
        None => watched.settings.publishers.iter().collect(),
        Some(publisher) => vec![the_publisher(watched, Some(&publisher))?],
    };
    let with_place: Vec<_> = chosen.into_iter().filter(|one| one.dead_letter != DeadLetter::None).collect();
    let _few = observed.few_at_once().await;
    let mut letters = Vec::new();
    // Publishers mostly share a place.
    let mut open: Option<(&DeadLetter, Store)> = None;
    for publisher in &with_place {
        let whose = whose(watched, publisher);
        let mut store = match open.take() {
            Some((place, store @ Store::Table(_))) if *place == publisher.dead_letter => store,
            _ => in_time(Store::open(publisher, &whose)).await?,
        };
        letters.extend(in_time(store.newest(&whose, limit)).await?);
        open = Some((&publisher.dead_letter, store));
    }
    letters.sort_by(|one: &Kept, other| other.failed_at.cmp(&one.failed_at));
    letters.truncate(limit as usize);
    let places: Vec<_> = with_place.iter().map(|one| one.dead_letter.describe()).collect();
    let letters: Vec<_> = letters.iter().map(|letter| letter.to_json(false)).collect();
    Ok(Json(json!({ "pipeline": name, "places": places, "letters": letters })).into_response())
}

pub async fn show(
    Shared(observed): Shared<Arc<Observed>>,
    (Path((name, id)), RawQuery(query), headers): Passed,
) -> Answered {
    observed.guard.check(&headers).map_err(|refusal| refusal.into_response())?;
    let watched = find(&observed, &name)?;
    let publisher = the_publisher(watched, parameter(query.as_deref(), "publisher").as_deref())?;
    let whose = whose(watched, publisher);
    let _few = observed.few_at_once().await;
    let found = in_time(async { Store::open(publisher, &whose).await?.find(&whose, &id).await }).await?;
    let mut kept = found.ok_or_else(|| missing(&name, &id))?;
    Ok(Json(shown(&mut kept)).into_response())
}

/// A letter with as much of its payload as is shown.
fn shown(kept: &mut Kept) -> Value {
    let bytes = kept.letter.value.as_ref().map(Vec::len);
    if let Some(value) = kept.letter.value.as_mut().filter(|value| value.len() > LARGEST_VALUE) {
        // Not in the middle of a character, so that what is text stays text.
        let within = |at: &usize| value[*at] & 0b1100_0000 == 0b1000_0000;
        let end = (LARGEST_VALUE - 3..=LARGEST_VALUE).rev().find(|at| !within(at)).unwrap_or(LARGEST_VALUE);
        value.truncate(end);
    }
    let mut letter = kept.to_json(true);
    letter["value_bytes"] = json!(bytes);
    letter["truncated"] = json!(bytes.is_some_and(|bytes| bytes > LARGEST_VALUE));
    letter
}

pub async fn replay(
    Shared(observed): Shared<Arc<Observed>>,
    (Path((name, id)), RawQuery(query), headers): Passed,
) -> Answered {
    observed.guard.check(&headers).map_err(|refusal| refusal.into_response())?;
    let watched = find(&observed, &name)?.clone();
    let publisher = the_publisher(&watched, parameter(query.as_deref(), "publisher").as_deref())?.clone();
    let busy = "another letter is being sent again: try again in a moment";
    let Ok(alone) = observed.replaying.clone().try_lock_owned() else {
        return Err(failed(StatusCode::CONFLICT, busy));
    };
    // On its own, so that a client that goes away does not end it between the acknowledgement and the mark.
    let sending = tokio::spawn(async move {
        let _alone = alone;
        Box::pin(send_again(&watched, &publisher, &name, &id)).await
    });
    match tokio::time::timeout(REPLAY_PATIENCE, sending).await {
        Ok(Ok(sent)) => sent,
        Ok(Err(died)) => Err(failed(StatusCode::INTERNAL_SERVER_ERROR, died.to_string())),
        Err(_) => {
            let what = "the sink has not answered yet; it is still being tried, and the letter shows when it was taken";
            Err(failed(StatusCode::GATEWAY_TIMEOUT, what))
        }
    }
}

async fn send_again(watched: &Watched, publisher: &PublisherSettings, name: &str, id: &str) -> Answered {
    let whose = whose(watched, publisher);
    let mut store = in_time(Store::open(publisher, &whose)).await?;
    let kept = in_time(store.find(&whose, id)).await?.ok_or_else(|| missing(name, id))?;
    let gone = || failed(StatusCode::NOT_FOUND, format!("pipeline `{name}` has no such publisher"));
    let mut replayer = Replayer::new(&watched.settings, publisher).ok_or_else(gone)?;
    let sent = replayer.send(&kept.letter).await;
    replayer.close().await;
    match sent.map_err(|failure| unavailable(&failure.into()))? {
        Outcome::Refused(why) => {
            Err(failed(StatusCode::UNPROCESSABLE_ENTITY, format!("the dead letter {id} was refused again: {why}")))
        }
        Outcome::Delivered(moment) => {
            tracing::info!(pipeline = name, publisher = publisher.name, letter = id, "a dead letter was replayed");
            let unmarked = |failure: StoreFailure| {
                let what = format!("the dead letter {id} was delivered and could not be marked so: {failure}");
                failed(StatusCode::BAD_GATEWAY, what)
            };
            store.mark_replayed(id, &moment).await.map_err(unmarked)?;
            // In a topic nothing can be marked.
            let marked = matches!(store, Store::Table(_));
            let topic = &kept.letter.topic;
            Ok(Json(json!({ "id": id, "topic": topic, "replayed_at": moment, "marked": marked })).into_response())
        }
    }
}

fn find<'a>(observed: &'a Observed, name: &str) -> Result<&'a Watched, axum::response::Response> {
    observed.find(name).ok_or_else(|| failed(StatusCode::NOT_FOUND, format!("there is no pipeline `{name}`")))
}

/// The publisher of this name; or the only one.
fn the_publisher<'a>(
    watched: &'a Watched,
    name: Option<&str>,
) -> Result<&'a PublisherSettings, axum::response::Response> {
    let (pipeline, publishers) = (&watched.settings.name, &watched.settings.publishers);
    match name {
        None if publishers.len() == 1 => Ok(&publishers[0]),
        None => {
            let known: Vec<_> = publishers.iter().map(|one| one.name.as_str()).collect();
            let what =
                format!("pipeline `{pipeline}` has several publishers: say ?publisher=, one of {}", known.join(", "));
            Err(failed(StatusCode::BAD_REQUEST, what))
        }
        Some(name) => publishers
            .iter()
            .find(|one| one.name == name)
            .ok_or_else(|| failed(StatusCode::NOT_FOUND, format!("pipeline `{pipeline}` has no publisher `{name}`"))),
    }
}

fn whose(watched: &Watched, publisher: &PublisherSettings) -> Whose {
    Whose { pipeline: watched.settings.name.clone(), publisher: publisher.name.clone() }
}

fn missing(pipeline: &str, id: &str) -> axum::response::Response {
    failed(StatusCode::NOT_FOUND, format!("there is no dead letter `{id}` of pipeline `{pipeline}`"))
}

fn unavailable(failure: &StoreFailure) -> axum::response::Response {
    let status = match failure {
        StoreFailure::Nowhere => StatusCode::NOT_FOUND,
        _ => StatusCode::BAD_GATEWAY,
    };
    failed(status, failure.to_string())
}

async fn in_time<T>(asked: impl Future<Output = Result<T, StoreFailure>>) -> Result<T, axum::response::Response> {
    // The futures of three databases are large.
    match tokio::time::timeout(PLACE_PATIENCE, Box::pin(asked)).await {
        Ok(answered) => answered.map_err(|failure| unavailable(&failure)),
        Err(_) => Err(failed(StatusCode::GATEWAY_TIMEOUT, "the place of the dead letters does not answer")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letters::letter::Letter;

    #[test]
    fn a_large_payload_is_cut_between_two_characters_and_said_to_be() {
        let of =
            |value: &str| Kept { letter: Letter { value: Some(value.into()), ..Letter::default() }, ..Kept::default() };
        let small = shown(&mut of("{\"n\": 1}"));
        assert_eq!(
            (&small["value"], &small["truncated"], &small["value_bytes"]),
            (&json!("{\"n\": 1}"), &json!(false), &json!(8))
        );
        for shift in 0..3 {
            let large = "x".repeat(shift) + &"€".repeat(LARGEST_VALUE / 3 + 10);
            let cut = shown(&mut of(&large));
            let text = cut["value"].as_str().expect("it is still text");
            assert!(text.len() <= LARGEST_VALUE && text.len() > LARGEST_VALUE - 4, "{}", text.len());
            assert_eq!((&cut["truncated"], &cut["value_bytes"]), (&json!(true), &json!(large.len())));
        }
    }
}
