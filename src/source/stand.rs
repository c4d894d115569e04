//! Where a pipeline stands, for a person to look at and to change.
//!
//! ```text
//!   look                                                 nothing is held, nothing is changed
//!   hold ─▶ plan: from, to, what is skipped and repeated ─▶ (the person agrees) ─▶ audit record ─▶ notes ─▶ position
//! ```
//!
//! Nothing is changed under a running instance: it would not notice, and store its own position a moment later. What is
//! given up by skipping is counted in the log itself before anybody is asked. Notes on publishers come before the
//! position, so that a crash between the two never skips what was not agreed to.

use serde::Serialize;

use super::audit::Entry;
use super::notes::NoteBook;
use super::{Memory, SourceFailure, mongodb, mysql, poll, postgres};
use crate::checkpoint::publishers::{PublisherNotes, Standing};
use crate::config::{Capture, PipelineSettings, SourceSettings};
use crate::event::Projection;
use crate::position::Position;

/// How long events are counted that would be skipped or repeated, and how many at the most.
pub const COUNTING: std::time::Duration = std::time::Duration::from_secs(15);
pub const MOST_COUNTED: u64 = 1_000_000;

/// Where a pipeline stands.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Stand {
    pub pipeline: String,
    /// The kind of database, and its address.
    pub source: String,
    pub address: String,
    /// As `set` and `--start` take it; none when the pipeline has never run.
    pub position: Option<String>,
    pub kept_in: String,
    /// Where the log can still be entered, and where it ends.
    pub log_begins: Option<String>,
    pub log_ends: Option<String>,
    /// The same in the server's own files, or by the calendar.
    pub log_reach: Option<String>,
    pub behind_bytes: Option<u64>,
    /// Who runs the pipeline now.
    pub held_by: Option<String>,
    /// What a person should know before going on from there.
    pub remarks: Vec<String>,
    pub publishers: Vec<PublisherStand>,
}

#[derive(Clone, Debug, Serialize)]
pub struct PublisherStand {
    pub name: String,
    pub state: &'static str,
    pub position: Option<String>,
}

/// A position that a person has in mind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The end of the log.
    Now,
    /// Where it can still be entered.
    Earliest,
    At(String),
}

impl Target {
    pub fn parse(text: &str) -> Self {
        match text {
            "now" => Target::Now,
            "earliest" => Target::Earliest,
            position => Target::At(position.trim().to_owned()),
        }
    }
}

/// Events of the log, as far as they were counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counted {
    /// There can be none.
    Nothing,
    Events(u64),
    /// There are more.
    AtLeast(u64),
    Unknown(String),
}

impl std::fmt::Display for Counted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Counted::Nothing => f.write_str("nothing"),
            Counted::Events(0) => f.write_str("no event"),
            Counted::Events(1) => f.write_str("1 event"),
            Counted::Events(events) => write!(f, "{} events", crate::figures::count(*events)),
            Counted::AtLeast(events) => write!(f, "more than {} events", crate::figures::count(*events)),
            Counted::Unknown(why) => write!(f, "events that could not be counted: {why}"),
        }
    }
}

/// What a change would mean.
#[derive(Clone, Debug)]
pub struct Change {
    pub from: Option<String>,
    pub to: String,
    /// Never delivered.
    pub skips: Counted,
    /// Delivered once more.
    pub repeats: Counted,
    pub remarks: Vec<String>,
}

/// Which publisher is meant; `None` means all.
pub type Whose<'a> = Option<&'a str>;

fn no_position(settings: &PipelineSettings) -> SourceFailure {
    SourceFailure::Misconfigured {
        what: format!("pipeline `{}` polls a table whose rows have a status: it has no position", settings.name),
        remedy:
            "set the rows' own status by SQL: `pending` to deliver one again, `published` to skip it (docs/polling.md)"
                .to_owned(),
    }
}

/// Looks, without holding anything.
pub async fn look(settings: &PipelineSettings) -> Result<Stand, SourceFailure> {
    let mut stand = match (&settings.capture, &settings.source) {
        (Capture::Poll(_), _) => return Err(no_position(settings)),
        (Capture::Positions(_), SourceSettings::Postgres(source)) => poll::stand::look(source, settings).await?,
        (_, SourceSettings::Postgres(source)) => postgres::stand::look(source, settings).await?,
        (_, SourceSettings::MySql(source)) => Box::pin(mysql::stand::look(source, settings)).await?,
        (_, SourceSettings::Mongo(source)) => Box::pin(mongodb::stand::look(source, settings)).await?,
    };
    stand.pipeline.clone_from(&settings.name);
    if stand.publishers.is_empty() {
        // Whoever may not read the notes is told where the pipeline is all the same.
        if let Ok(Some(notes)) = notes(settings).await {
            stand.publishers = noted(settings, &notes);
        }
    }
    Ok(stand)
}

fn noted(settings: &PipelineSettings, notes: &PublisherNotes) -> Vec<PublisherStand> {
    let known = |name: &String| settings.publishers.iter().any(|publisher| publisher.name == *name);
    let shown = notes.publishers.iter().filter(|(name, _)| known(name));
    shown
        .map(|(name, note)| PublisherStand {
            name: name.clone(),
            state: match note.state {
                Standing::Active => "active",
                Standing::Paused => "paused",
                Standing::Failed => "failed",
            },
            position: note.position.clone(),
        })
        .collect()
}

/// A pipeline that is held, so that nobody runs it meanwhile.
pub enum Held<'a> {
    Postgres(Box<postgres::stand::Held<'a>>),
    MySql(Box<mysql::stand::Held<'a>>),
    Mongo(Box<mongodb::stand::Held<'a>>),
    Events(Box<poll::stand::Held<'a>>),
}

impl<'a> Held<'a> {
    pub async fn take(settings: &'a PipelineSettings, projection: &'a Projection) -> Result<Self, SourceFailure> {
        Ok(match (&settings.capture, &settings.source) {
            (Capture::Poll(_), _) => return Err(no_position(settings)),
            (Capture::Positions(_), SourceSettings::Postgres(source)) => {
                Held::Events(Box::new(poll::stand::Held::take(source, settings).await?))
            }
            (_, SourceSettings::Postgres(source)) => {
                Held::Postgres(Box::new(postgres::stand::Held::take(source, settings).await?))
            }
            (_, SourceSettings::MySql(source)) => {
                Held::MySql(Box::new(mysql::stand::Held::take(source, settings, projection).await?))
            }
            (_, SourceSettings::Mongo(source)) => {
                Held::Mongo(Box::new(Box::pin(mongodb::stand::Held::take(source, settings)).await?))
            }
        })
    }

    pub async fn plan(&mut self, target: &Target, whose: Whose<'_>) -> Result<Change, SourceFailure> {
        match self {
            Held::Postgres(held) => held.plan(target, whose).await,
            Held::MySql(held) => Box::pin(held.plan(target, whose)).await,
            Held::Mongo(held) => Box::pin(held.plan(target, whose)).await,
            Held::Events(held) => held.plan(target, whose).await,
        }
    }

    /// Ends only when the pipeline can be held no longer.
    pub async fn keep(&self) -> SourceFailure {
        match self {
            Held::Mongo(held) => held.keep().await,
            // A session holds the others as long as it lives, and tells when it is used.
            Held::Postgres(_) | Held::MySql(_) | Held::Events(_) => std::future::pending().await,
        }
    }

    /// Records the change.
    pub async fn audit(&mut self, entry: &Entry) -> Result<(), SourceFailure> {
        match self {
            Held::Postgres(held) => held.audit(entry).await,
            Held::MySql(held) => held.audit(entry).await,
            Held::Mongo(held) => held.audit(entry).await,
            Held::Events(held) => held.audit(entry).await,
        }
    }

    /// Carries out what was planned last; where the pipeline stands then.
    pub async fn carry_out(&mut self) -> Result<String, SourceFailure> {
        match self {
            Held::Postgres(held) => held.carry_out().await,
            Held::MySql(held) => Box::pin(held.carry_out()).await,
            Held::Mongo(held) => Box::pin(held.carry_out()).await,
            Held::Events(held) => held.carry_out().await,
        }
    }

    pub async fn release(self) {
        match self {
            Held::MySql(held) => held.release().await,
            Held::Mongo(held) => held.release().await,
            // Their sessions end.
            Held::Postgres(_) | Held::Events(_) => {}
        }
    }
}

/// What a change makes of the notes on publishers, and of the position that the source is read from.
pub struct Arranged {
    /// `None`: there are no notes, and none are needed.
    pub notes: Option<PublisherNotes>,
    /// `None`: it stays where it is.
    pub source: Option<Position>,
    /// Where the one that is meant stood.
    pub from: Option<Position>,
}

/// Whose position it is in a pipeline: the source is read from the least of them.
pub struct Arranging<'a> {
    pub settings: &'a PipelineSettings,
    pub notes: Option<PublisherNotes>,
    pub lineage: &'a str,
    /// Where the source is read from.
    pub from: Option<&'a Position>,
    pub to: &'a Position,
}

impl Arranging<'_> {
    pub fn arrange(self, whose: Whose<'_>) -> Result<Arranged, SourceFailure> {
        match whose {
            None => Ok(self.all()),
            Some(publisher) => self.one(publisher),
        }
    }

    /// Notes of another history say nothing here.
    fn own_notes(&self) -> PublisherNotes {
        self.notes.clone().unwrap_or_default().of_lineage(self.lineage, false)
    }

    fn all(self) -> Arranged {
        let mut notes = self.own_notes();
        let mut changed = false;
        for note in notes.publishers.values_mut().filter(|note| note.state != Standing::Failed) {
            note.position = Some(self.to.to_string());
            changed = true;
        }
        Arranged { notes: changed.then_some(notes), source: Some(self.to.clone()), from: self.from.cloned() }
    }

    fn one(self, publisher: &str) -> Result<Arranged, SourceFailure> {
        let refused =
            |what: String, remedy: &str| Err(SourceFailure::Misconfigured { what, remedy: remedy.to_owned() });
        let known: Vec<_> = self.settings.publishers.iter().map(|one| one.name.as_str()).collect();
        if self.settings.is_lone() || !known.contains(&publisher) {
            let what = format!("pipeline `{}` has no publisher `{publisher}`", self.settings.name);
            return refused(what, "outboxd position show names those that it has");
        }
        let mut notes = self.own_notes();
        if notes.publishers.get(publisher).is_some_and(|note| note.state == Standing::Failed) {
            let what = format!("publisher `{publisher}` has failed, and its position was let go");
            return refused(what, "resume it: it goes on where the others stand");
        }
        let Some(from) = self.from else {
            return refused("the pipeline has no position yet".to_owned(), "run it once first");
        };
        if !from.covers(self.to) && !self.to.covers(from) {
            let what = format!("{} is neither ahead of {from} nor behind it", self.to);
            return refused(what, "move all publishers at once, or give a position that is one of the two");
        }
        let mut stood = from.clone();
        for name in known {
            let note = notes.publishers.entry(name.to_owned()).or_default();
            if note.state == Standing::Failed {
                continue;
            }
            let own = note.position.as_ref().and_then(|text| from.parse_alike(text));
            // Whoever has no note stands where the source does.
            let own = own.filter(|own| own.covers(from)).unwrap_or_else(|| from.clone());
            if name == publisher {
                stood = own;
                note.position = Some(self.to.to_string());
            } else {
                note.position = Some(own.to_string());
            }
        }
        // Those that are ahead are passed over by the source until it has come to them.
        let back = from.covers(self.to) && from != self.to;
        Ok(Arranged { notes: Some(notes), source: back.then(|| self.to.clone()), from: Some(stood) })
    }
}

/// Writes the notes, if there are any to write.
pub async fn note(settings: &PipelineSettings, notes: Option<&PublisherNotes>) -> Result<(), SourceFailure> {
    let Some(notes) = notes else { return Ok(()) };
    let mut book = NoteBook::open(settings, &Memory::new(settings)).await?;
    book.prepare().await?;
    let saved = book.save(notes).await;
    book.close().await;
    saved
}

/// The notes there are.
pub async fn notes(settings: &PipelineSettings) -> Result<Option<PublisherNotes>, SourceFailure> {
    let mut book = NoteBook::open(settings, &Memory::new(settings)).await?;
    let notes = book.peek().await;
    book.close().await;
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::publishers::PublisherNote;
    use crate::config::{PipelineOptions, Said, Settings};
    use crate::position::Lsn;

    const FILE: &str = "[pipeline.shop]\nsource = 'postgres://h/db'\nbrokers = 'k:1'\ntopic = 't'\n\
                        [pipeline.shop.publisher.a]\n[pipeline.shop.publisher.b]\n";

    fn shop(file: Option<&str>) -> PipelineSettings {
        let mut said = Said::default();
        if file.is_none() {
            said.pipeline = PipelineOptions {
                source: Some("postgres://h/db".into()),
                brokers: Some("k:1".to_owned()),
                ..PipelineOptions::default()
            };
        }
        let file = file.map(|text| crate::config::parse("f", text).unwrap());
        Settings::resolve(said, file).unwrap().pipelines.remove(0)
    }

    fn at(lsn: u64) -> Position {
        Position::Postgres(Lsn(lsn))
    }

    fn arranged(from: u64, to: u64, noted: &[(&str, Standing, u64)], whose: Whose<'_>) -> Result<Arranged, String> {
        let settings = shop(Some(FILE));
        let mut notes = PublisherNotes { lineage: "l".to_owned(), ..PublisherNotes::default() };
        for (name, state, lsn) in noted {
            let position = Some(Lsn(*lsn).to_string());
            notes
                .publishers
                .insert((*name).to_owned(), PublisherNote { state: *state, position, reason: String::new() });
        }
        let (from, to) = (at(from), at(to));
        let arranging = Arranging { settings: &settings, notes: Some(notes), lineage: "l", from: Some(&from), to: &to };
        arranging.arrange(whose).map_err(|failure| failure.to_string())
    }

    fn positions(arranged: &Arranged) -> Vec<(String, String)> {
        let notes = arranged.notes.as_ref().map(|notes| notes.publishers.clone()).unwrap_or_default();
        notes.into_iter().map(|(name, note)| (name, note.position.unwrap_or_default())).collect()
    }

    fn pair(name: &str, lsn: u64) -> (String, String) {
        (name.to_owned(), Lsn(lsn).to_string())
    }

    #[test]
    fn all_publishers_go_where_the_pipeline_goes_but_for_those_that_were_let_go() {
        let noted = [("a", Standing::Active, 90), ("b", Standing::Failed, 10)];
        let back = arranged(50, 20, &noted, None).unwrap();
        assert_eq!(positions(&back), [pair("a", 20), pair("b", 10)]);
        assert_eq!(back.source, Some(at(20)));
    }

    #[test]
    fn one_that_skips_ahead_leaves_the_others_and_the_source_where_they_are() {
        let ahead = arranged(50, 80, &[("b", Standing::Active, 60)], Some("a")).unwrap();
        assert_eq!(positions(&ahead), [pair("a", 80), pair("b", 60)]);
        assert_eq!((ahead.source, ahead.from), (None, Some(at(50))));
    }

    #[test]
    fn one_that_goes_back_takes_the_source_along_and_the_others_repeat_nothing() {
        let back = arranged(50, 20, &[("a", Standing::Active, 70)], Some("a")).unwrap();
        assert_eq!(positions(&back), [pair("a", 20), pair("b", 50)]);
        assert_eq!((back.source, back.from), (Some(at(20)), Some(at(70))));
    }

    #[test]
    fn one_that_is_not_there_or_was_let_go_is_refused() {
        assert!(arranged(5, 9, &[], Some("c")).err().unwrap().contains("no publisher `c`"));
        assert!(arranged(5, 9, &[("a", Standing::Failed, 1)], Some("a")).err().unwrap().contains("has failed"));
    }

    #[test]
    fn a_lone_pipeline_without_notes_gets_none() {
        let settings = shop(None);
        let (from, to) = (at(5), at(9));
        let arranging = Arranging { settings: &settings, notes: None, lineage: "l", from: Some(&from), to: &to };
        let arranged = arranging.arrange(None).unwrap();
        assert!(arranged.notes.is_none() && arranged.source == Some(to));
    }
}
