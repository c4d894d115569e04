//! The position in a change stream by hand: a resume token, or the token of a cluster time. The lease is held meanwhile, as
//! a run holds it, and the position is stored under it.

use mongodb::bson::Document;
use tokio::time::Instant;

use super::change_stream::{Entry as Enter, Watch};
use super::checkpoint::{self, Place};
use super::lease::{self, Lease, Renewed, Taking};
use super::server::{self, Connection, Oplog, Server};
use super::token::{ResumeToken, StartPoint, StreamPosition};
use super::{judge, watch_of};
use crate::checkpoint::publishers::PublisherNotes;
use crate::checkpoint::{Checkpoint, SnapshotState};
use crate::config::{CheckpointPlace, MongoSettings, PipelineSettings};
use crate::position::Position;
use crate::source::SourceFailure;
use crate::source::audit::{self, Entry};
use crate::source::stand::{self, Arranging, COUNTING, Change, Counted, MOST_COUNTED, Stand, Target, Whose};

fn kept_in(settings: &MongoSettings, connection: &Connection) -> String {
    match &settings.checkpoint {
        CheckpointPlace::Source => format!("collection {}", checkpoint::described(connection.database.name())),
        elsewhere => elsewhere.describe(),
    }
}

pub async fn look(settings: &MongoSettings, of: &PipelineSettings) -> Result<Stand, SourceFailure> {
    let connection = server::connect(settings).await?;
    let server = Server::ask(&connection).await?;
    let place = Place::open(&settings.checkpoint, &of.kafka)?;
    let document = lease::document(&connection.database, &of.name).await?.unwrap_or_default();
    let stored = place.peek(&of.name, &document).await?;
    let mut remarks = Vec::new();
    if let Some(stored) = &stored {
        match judge::position(stored, &checkpoint::identity(server.name(), &document)) {
            Err(failure) => remarks.push(failure.to_string()),
            Ok(at) => remarks.push(format!("that is {}", judge::when(at.time))),
        }
        if stored.snapshot == SnapshotState::Pending {
            remarks.push("the documents that were in the collection are delivered first, all of them".to_owned());
        }
    }
    // Only some users may look there.
    let oplog = server::oplog(&connection.client).await.ok();
    let end = oplog.map_or(server.now, |oplog| oplog.last);
    let shown = Stand {
        source: "mongodb".to_owned(),
        address: server.address.clone(),
        position: stored.map(|stored| stored.position),
        kept_in: kept_in(settings, &connection),
        log_begins: oplog.map(|Oplog { first, .. }| first.to_string()),
        log_ends: Some(end.to_string()),
        log_reach: oplog.map(|Oplog { first, .. }| format!("{} to {}", judge::when(first), judge::when(end))),
        held_by: lease::holder(&connection.database, &of.name).await?,
        remarks,
        ..Stand::default()
    };
    connection.close().await;
    Ok(shown)
}

pub struct Held<'a> {
    settings: &'a MongoSettings,
    of: &'a PipelineSettings,
    connection: Connection,
    server: Server,
    watch: Watch,
    place: Place,
    lease: Lease,
    identity: String,
    stored: Checkpoint,
    /// `None` where it is of another server.
    from: Option<StreamPosition>,
    planned: Option<Planned>,
}

struct Planned {
    /// `None`: publishers alone.
    source: Option<ResumeToken>,
    to: String,
    notes: Option<PublisherNotes>,
}

impl<'a> Held<'a> {
    pub async fn take(settings: &'a MongoSettings, of: &'a PipelineSettings) -> Result<Self, SourceFailure> {
        let connection = server::connect(settings).await?;
        let server = Server::ask(&connection).await?;
        if let Some(failure) = judge::server(&server).into_iter().next() {
            return Err(failure);
        }
        let place = Place::open(&settings.checkpoint, &of.kafka)?;
        let known = lease::document(&connection.database, &of.name).await?.unwrap_or_else(Document::new);
        if place.peek(&of.name, &known).await?.is_none() {
            return Err(SourceFailure::NotReady {
                what: format!("pipeline `{}` has no position yet", of.name),
                remedy: "outboxd init, or a first run; --start says where it begins".to_owned(),
            });
        }
        let holder = format!("{} (outboxd position set)", audit::os_user());
        let taking = lease::take(&connection.database, &of.name, &holder, false, lease::TERM).await?;
        let taken = match taking {
            Taking::Taken(taken) => taken,
            Taking::Held { holder, .. } => return Err(lease::held(&of.name, &holder)),
        };
        // As it is now that nobody else can change it.
        let stored = place.peek(&of.name, &taken.document).await?;
        let stored = stored.ok_or_else(|| judge::removed(&of.name))?;
        let identity = checkpoint::identity(server.name(), &taken.document);
        let from = judge::position(&stored, &identity).ok();
        let watch = watch_of(settings, &connection, &server);
        let lease = taken.lease;
        Ok(Held { settings, of, connection, server, watch, place, lease, identity, stored, from, planned: None })
    }

    /// Renews the lease while a person thinks.
    pub async fn keep(&self) -> SourceFailure {
        self.lease.keep().await
    }

    pub async fn plan(&mut self, target: &Target, whose: Whose<'_>) -> Result<Change, SourceFailure> {
        let token = tokio::select! {
            token = self.token(target) => token?,
            failure = self.lease.keep() => return Err(failure),
        };
        let to = StreamPosition::after(token.clone());
        let notes = stand::notes(self.of).await?;
        let (from, wanted) = (self.from.as_ref().map(position), position(&to));
        let arranging =
            Arranging { settings: self.of, notes, lineage: &self.identity, from: from.as_ref(), to: &wanted };
        let arranged = arranging.arrange(whose)?;
        let stood = match arranged.from {
            Some(Position::Mongo(stood)) => Some(*stood),
            _ => self.from.clone(),
        };
        let counting = async {
            match &stood {
                Some(stood) => {
                    let skips = if stood.covers(&to) { Counted::Nothing } else { self.count(stood, &token).await };
                    let repeats = match (to.covers(stood), &stood.token) {
                        (false, Some(upto)) => self.count(&to, upto).await,
                        _ => Counted::Nothing,
                    };
                    (skips, repeats)
                }
                None => (Counted::Unknown("the old position is of another server".to_owned()), Counted::Nothing),
            }
        };
        let (skips, repeats) = tokio::select! {
            counted = counting => counted,
            failure = self.lease.keep() => return Err(failure),
        };
        let mut remarks = vec![format!("the new position is {}", judge::when(to.time))];
        if self.stored.snapshot == SnapshotState::Pending {
            remarks.push("the documents that were in the collection are still delivered first, all of them".to_owned());
        }
        let source = arranged.source.is_some().then(|| token.clone());
        self.planned = Some(Planned { source, to: token.to_string(), notes: arranged.notes });
        let from = stood.map(|stood| stood.to_string()).or_else(|| Some(self.stored.position.clone()));
        Ok(Change { from, to: token.to_string(), skips, repeats, remarks })
    }

    /// The position that is meant, as a token that the oplog has.
    async fn token(&self, target: &Target) -> Result<ResumeToken, SourceFailure> {
        let misconfigured = |what: String| SourceFailure::Misconfigured {
            what,
            remedy: "give one as `outboxd position show` prints it, a cluster time, `now` or `earliest`".to_owned(),
        };
        let entry = match target {
            Target::Now => Enter::Now,
            Target::Earliest => Enter::At(server::oplog(&self.connection.client).await?.first),
            Target::At(text) => match text.parse() {
                Ok(StartPoint::At(time)) => Enter::At(time),
                Ok(StartPoint::After(token)) => Enter::After(token),
                Err(error) => return Err(misconfigured(error.to_string())),
            },
        };
        let time = match &entry {
            Enter::Now => self.server.now,
            Enter::At(time) => *time,
            Enter::After(token) => token.time(),
        };
        // The server would wait for it.
        if time > self.server.now {
            let (time, now) = (judge::when(time), judge::when(self.server.now));
            return Err(misconfigured(format!("{time} lies beyond the server's last operation, {now}")));
        }
        match self.watch.position(&entry).await {
            Err(SourceFailure::PositionLost { what, .. }) => Err(SourceFailure::PositionLost {
                what: format!("the oplog no longer has what follows {}: {what}", judge::when(time)),
                remedy: "give a position that the oplog still has, or `earliest`; what lies before must be delivered from the \
                         collection"
                    .to_owned(),
            }),
            // A token of an event is where the stream is entered again; the server may answer with a later one.
            Ok(found) => Ok(match entry {
                Enter::After(token) => token,
                Enter::Now | Enter::At(_) => found,
            }),
            Err(failure) => Err(failure),
        }
    }

    /// Inserts that follow the position, up to the token.
    async fn count(&self, after: &StreamPosition, upto: &ResumeToken) -> Counted {
        let entry = super::entry(after, Some(&self.stored), &self.watch.scope);
        let mut stream = match self.watch.open(&entry).await {
            Ok(stream) => stream,
            Err(failure) => return Counted::Unknown(failure.to_string()),
        };
        let deadline = Instant::now() + COUNTING;
        let mut events = 0;
        loop {
            let batch = match tokio::time::timeout_at(deadline, stream.next(COUNTING)).await {
                Err(_) => return Counted::AtLeast(events),
                Ok(Err(failure)) => return Counted::Unknown(failure.to_string()),
                Ok(Ok(None)) => return Counted::AtLeast(events),
                Ok(Ok(Some(batch))) => batch,
            };
            for event in batch.documents().into_iter().flatten().flatten() {
                let Some(event) = event.as_document() else { continue };
                let token = event.get_document("_id").ok().and_then(ResumeToken::from_raw);
                if token.is_some_and(|token| token > *upto) {
                    return Counted::Events(events);
                }
                // Of an event that came in pieces, the first.
                let part = event.get_document("splitEvent").ok().and_then(|part| part.get_i32("fragment").ok());
                let insert = event.get_str("operationType").is_ok_and(|kind| kind == "insert");
                events += u64::from(insert && part.is_none_or(|part| part == 1));
            }
            if batch.position().is_some_and(|position| position >= *upto) {
                return Counted::Events(events);
            }
            if events >= MOST_COUNTED {
                return Counted::AtLeast(events);
            }
        }
    }

    pub async fn audit(&mut self, entry: &Entry) -> Result<(), SourceFailure> {
        match audit::in_mongodb(&self.connection.database, entry).await {
            Err(refused) => match audit::elsewhere(&self.settings.checkpoint, &self.of.kafka, entry).await? {
                true => Ok(()),
                false => Err(refused),
            },
            recorded => recorded,
        }
    }

    pub async fn carry_out(&mut self) -> Result<String, SourceFailure> {
        let Some(Planned { source, to, notes }) = self.planned.take() else {
            return Err(SourceFailure::transient("nothing was planned"));
        };
        // Nobody may have taken over while a person thought.
        if let Renewed::Lost = self.lease.renew(None).await? {
            return Err(self.lease.lost());
        }
        stand::note(self.of, notes.as_ref()).await?;
        let Some(token) = source else { return Ok(to) };
        let changed = Checkpoint {
            server: self.identity.clone(),
            position: token.to_string(),
            file: self.watch.scope.to_string(),
            ..self.stored.clone()
        };
        let stored = match &self.place {
            Place::Document => self.lease.renew(Some(&changed)).await?,
            Place::Elsewhere(store) => {
                store.save(&changed).await?;
                Renewed::Held
            }
        };
        match stored {
            Renewed::Held => Ok(to),
            Renewed::Lost => Err(self.lease.lost()),
        }
    }

    pub async fn release(self) {
        let _ = self.lease.release().await;
        self.connection.close().await;
    }
}

fn position(at: &StreamPosition) -> Position {
    Position::Mongo(Box::new(at.clone()))
}
