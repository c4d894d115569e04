//! Requests that change what a pipeline or a publisher does: pause, resume, restart.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State as Shared};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use tokio::sync::oneshot;

use super::{Observed, Watched};
use crate::config::Capture;
use crate::source::poll::operators;
use crate::status::{Order, State};

/// A pipeline that has ended and is to run again; answered with whether that was so.
pub struct Revival {
    pub pipeline: String,
    pub reply: oneshot::Sender<bool>,
}

/// How long a pipeline that has just ended may take to be known as such.
const ENDING: Duration = Duration::from_secs(5);

/// An order that was not carried out.
#[derive(Debug)]
pub enum Disobeyed {
    /// No such pipeline or publisher.
    Unknown(String),
    /// Not now.
    Conflict(String),
}

impl Disobeyed {
    pub fn status(&self) -> StatusCode {
        match self {
            Disobeyed::Unknown(_) => StatusCode::NOT_FOUND,
            Disobeyed::Conflict(_) => StatusCode::CONFLICT,
        }
    }

    pub fn what(self) -> String {
        match self {
            Disobeyed::Unknown(what) | Disobeyed::Conflict(what) => what,
        }
    }
}

/// What is ordered, of a publisher or of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Pause,
    Resume,
    Restart,
}

impl Verb {
    fn of(self, publisher: Option<String>) -> Order {
        match self {
            Verb::Pause => Order::Pause(publisher),
            Verb::Resume => Order::Resume(publisher),
            Verb::Restart => Order::Restart(publisher),
        }
    }
}

/// What a route of a pipeline does with it.
pub async fn pipeline(
    verb: Verb,
    Shared(observed): Shared<Arc<Observed>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    in_words(&observed, &name, None, verb, &headers).await
}

pub async fn publisher(
    verb: Verb,
    Shared(observed): Shared<Arc<Observed>>,
    Path((name, publisher)): Path<(String, String)>,
    headers: HeaderMap,
) -> Response {
    in_words(&observed, &name, Some(&publisher), verb, &headers).await
}

/// Answers in a line of text, which the command line passes on.
async fn in_words(
    observed: &Observed,
    name: &str,
    publisher: Option<&str>,
    verb: Verb,
    headers: &HeaderMap,
) -> Response {
    if let Err(refusal) = observed.guard.check(headers) {
        return (refusal.status, format!("{}\n", refusal.what)).into_response();
    }
    match observed.order(name, publisher, verb).await {
        Ok(()) => (StatusCode::OK, "done\n").into_response(),
        Err(disobeyed) => (disobeyed.status(), disobeyed.what() + "\n").into_response(),
    }
}

impl Observed {
    /// Has a pipeline, or one of its publishers, do something, and waits until it has. Whether whoever asks may is another
    /// question.
    pub async fn order(&self, name: &str, publisher: Option<&str>, verb: Verb) -> Result<(), Disobeyed> {
        let unknown = || Disobeyed::Unknown(format!("there is no pipeline `{name}`"));
        let watched = self.find(name).ok_or_else(unknown)?;
        let known = |publisher: &str| watched.status.publishers.iter().any(|one| one.name() == publisher);
        if let Some(publisher) = publisher.filter(|publisher| !known(publisher)) {
            return Err(Disobeyed::Unknown(format!("pipeline `{name}` has no publisher `{publisher}`")));
        }
        match (watched.status.state(), verb) {
            (State::Failed | State::Stopped, Verb::Restart) => self.revive(watched, publisher).await,
            (State::Failed | State::Stopped, _) => {
                let state = watched.status.state().as_str();
                Err(Disobeyed::Conflict(format!("the pipeline has {state}: restart it")))
            }
            _ => watched.status.order(verb.of(publisher.map(str::to_owned))).await.map_err(Disobeyed::Conflict),
        }
    }

    /// Has a pipeline that has ended run again.
    async fn revive(&self, watched: &Watched, publisher: Option<&str>) -> Result<(), Disobeyed> {
        if matches!(watched.settings.capture, Capture::Positions(_)) {
            // There whoever has failed stands in the table as such.
            let forgiven = operators::forgive(&watched.settings, publisher).await;
            forgiven.map_err(|failure| Disobeyed::Conflict(failure.to_string()))?;
        }
        let asked = async {
            loop {
                let (reply, answer) = oneshot::channel();
                let revival = Revival { pipeline: watched.settings.name.clone(), reply };
                self.revivals.send(revival).await.ok()?;
                if answer.await.ok()? {
                    return Some(());
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let late = || Disobeyed::Conflict("the process is ending".to_owned());
        tokio::time::timeout(ENDING, asked).await.ok().flatten().ok_or_else(late)
    }
}
