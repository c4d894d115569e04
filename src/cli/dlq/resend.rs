//! Letters that are sent again, each after the one before it was acknowledged or refused. A letter that is refused again keeps
//! those of its key behind it, as it does in a relay.

use std::collections::{BTreeMap, HashSet};

use ring::digest::{Context, SHA256};

use super::rows::Rows;
use super::{Place, Store, held, sink_halt, source_halt, usage};
use crate::cli::print;
use crate::dead_letters::Letters;
use crate::dead_letters::letter::{Kept, Letter};
use crate::dead_letters::replay::{Outcome, Replayer};
use crate::dead_letters::topic::TopicLetters;
use crate::failure::{ExitCode, Halt};

/// Sends one letter, or all that wait.
pub async fn run(mut store: Store, place: &Place, id: Option<&str>) -> Result<ExitCode, Halt> {
    let replayer = Replayer::new(&place.pipeline, place.publisher());
    let replayer = replayer.ok_or_else(|| usage("the publisher is not of the pipeline", "name another"))?;
    let rows = Rows::of(&place.pipeline);
    let mut round = Round { place, replayer, rows, sent: 0, refused: 0, first: None, keys: HashSet::new(), behind: 0 };
    let ended = match (id, &mut store) {
        (Some(id), store) => round.one(store, id).await,
        (None, Store::Table(letters)) => round.all_of_table(letters).await,
        (None, Store::Topic(letters)) => round.all_of_topic(letters).await,
    };
    round.replayer.close().await;
    // What was sent before trouble came is told all the same.
    if id.is_none() {
        let behind = match round.behind {
            0 => String::new(),
            letters => format!(", {letters} behind a refused one of their key were not sent"),
        };
        print(format!("replayed {}, refused {}{behind}\n", round.sent, round.refused).as_bytes())?;
    }
    ended?;
    match round.first {
        None => Ok(ExitCode::Done),
        Some(what) => Err(Halt {
            code: ExitCode::Undeliverable,
            what,
            remedy: "remove the cause and replay it again, or purge it; it stays where it is".to_owned(),
        }),
    }
}

struct Round<'a> {
    place: &'a Place,
    replayer: Replayer<'a>,
    rows: Rows<'a>,
    sent: u64,
    refused: u64,
    /// What was refused first, and why.
    first: Option<String>,
    /// Of refused letters: no more than a digest of each, however many there are.
    keys: HashSet<[u8; 16]>,
    /// Letters that were not sent since one of their key was refused.
    behind: u64,
}

impl Round<'_> {
    /// Sends a letter; when it was acknowledged, the moment.
    async fn send(&mut self, kept: &Kept) -> Result<Option<String>, Halt> {
        let id = &kept.id;
        match self.replayer.send(&kept.letter).await.map_err(sink_halt)? {
            Outcome::Delivered(moment) => {
                self.sent += 1;
                let topic = kept.letter.topic.as_deref().filter(|topic| !topic.is_empty());
                print(
                    format!("replayed {id}{}\n", topic.map(|to| format!(" to {to}")).unwrap_or_default()).as_bytes(),
                )?;
                Ok(Some(moment))
            }
            Outcome::Refused(why) => {
                let what = format!("the dead letter {id} was refused again: {why}");
                eprintln!("{what}");
                self.refused += 1;
                self.first.get_or_insert(what);
                self.keys.extend(lane(&kept.letter));
                Ok(None)
            }
        }
    }

    async fn one(&mut self, store: &mut Store, id: &str) -> Result<(), Halt> {
        let whose = self.place.whose();
        if let Store::Table(letters) = store {
            letters.hold(&whose).await.map_err(source_halt)?;
        }
        let kept = store.find(&whose, id).await?;
        if let (true, Some(at)) = (kept.replayed, &kept.replayed_at) {
            eprintln!("the dead letter {id} was replayed before, at {at}; it is sent once more");
        }
        match store {
            Store::Table(letters) => match letters.claim(&kept).await.map_err(source_halt)? {
                true => self.one_of_table(letters, &kept).await,
                false => Err(held(format!("the dead letter {id} is being replayed by another"))),
            },
            Store::Topic(letters) => {
                if self.send(&kept).await?.is_none() {
                    return Ok(());
                }
                self.rows.settle(&kept.letter).await;
                let note = format!(
                    "the topic keeps it: `replay --all` sends it again unless the group {} is past it\n",
                    letters.group
                );
                print(note.as_bytes()).map(|_| ())
            }
        }
    }

    /// Sends a letter that is ours to send.
    async fn one_of_table(&mut self, letters: &mut Letters, kept: &Kept) -> Result<(), Halt> {
        match self.send(kept).await {
            Ok(Some(moment)) => {
                mark(letters, kept, &moment).await?;
                self.rows.settle(&kept.letter).await;
                Ok(())
            }
            unsent => {
                let released = letters.release(kept).await.map_err(source_halt);
                unsent.and(released)
            }
        }
    }

    async fn all_of_table(&mut self, letters: &mut Letters) -> Result<(), Halt> {
        let whose = self.place.whose();
        letters.hold(&whose).await.map_err(source_halt)?;
        let mut last: Option<String> = None;
        while let Some(kept) = letters.next_waiting(&whose, last.as_deref()).await.map_err(source_halt)? {
            if lane(&kept.letter).is_some_and(|lane| self.keys.contains(&lane)) {
                self.behind += 1;
            } else if letters.claim(&kept).await.map_err(source_halt)? {
                self.one_of_table(letters, &kept).await?;
            } else {
                eprintln!("the dead letter {} is being replayed by another, or was", kept.id);
            }
            last = Some(kept.id);
        }
        Ok(())
    }

    /// In each partition up to the first that is refused again, since an offset passes all before it.
    async fn all_of_topic(&mut self, letters: &TopicLetters) -> Result<(), Halt> {
        for (partition, span) in letters.spans.iter().filter(|(_, span)| span.replayed < span.high) {
            letters.commit(*partition, span.replayed).await.map_err(sink_halt)?;
            let range = BTreeMap::from([(*partition, (span.replayed, span.high))]);
            let mut reading = letters.read(range).map_err(sink_halt)?;
            // Letters of others are passed over.
            let (mut passed, mut committed) = (span.replayed, span.replayed);
            while let Some(found) = reading.next().await.map_err(sink_halt)? {
                if found.ours {
                    if self.send(&found.kept).await?.is_none() {
                        break;
                    }
                    if !letters.is_ours(*partition).await.map_err(sink_halt)? {
                        let pipeline = &self.place.pipeline.name;
                        return Err(held(format!(
                            "dead letters of pipeline `{pipeline}` are being replayed by another"
                        )));
                    }
                    self.rows.settle(&found.kept.letter).await;
                    committed = found.offset + 1;
                    letters.commit(*partition, committed).await.map_err(sink_halt)?;
                }
                passed = found.offset + 1;
            }
            if passed > committed {
                letters.commit(*partition, passed).await.map_err(sink_halt)?;
            }
        }
        Ok(())
    }
}

/// What letters must have in common to be kept in order; those without a key are in none.
fn lane(letter: &Letter) -> Option<[u8; 16]> {
    let mut digest = Context::new(&SHA256);
    digest.update(letter.topic.as_deref().unwrap_or_default().as_bytes());
    digest.update(&[0]);
    digest.update(letter.key.as_deref()?);
    let mut lane = [0; 16];
    lane.copy_from_slice(&digest.finish().as_ref()[..16]);
    Some(lane)
}

async fn mark(letters: &mut Letters, kept: &Kept, moment: &str) -> Result<(), Halt> {
    letters.mark_replayed(&kept.id, moment).await.map_err(|failure| {
        let halt = source_halt(failure);
        let what = format!("the dead letter {} was delivered and could not be marked so: {}", kept.id, halt.what);
        Halt { what, ..halt }
    })
}
