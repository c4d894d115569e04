//! Letters that are sent again.

use std::collections::BTreeMap;

use super::{Place, Store, sink_halt, source_halt, usage};
use crate::cli::print;
use crate::dead_letters::Letters;
use crate::dead_letters::letter::Kept;
use crate::dead_letters::replay::{Outcome, Replayer};
use crate::dead_letters::topic::TopicLetters;
use crate::failure::{ExitCode, Halt};

/// Sends one letter, or all that wait.
pub async fn run(mut store: Store, place: &Place, id: Option<&str>) -> Result<ExitCode, Halt> {
    let replayer = Replayer::new(&place.pipeline, place.publisher());
    let replayer = replayer.ok_or_else(|| usage("the publisher is not of the pipeline", "name another"))?;
    let mut round = Round { place, replayer, sent: 0, refused: Vec::new() };
    let ended = match id {
        Some(id) => {
            let kept = store.find(&place.whose(), id).await?;
            round.one(&mut store, &kept).await
        }
        None => match &mut store {
            Store::Table(letters) => round.all_of_table(letters).await,
            Store::Topic(letters) => round.all_of_topic(letters).await,
        },
    };
    round.replayer.close().await;
    // What was sent before trouble came is told all the same.
    if id.is_none() {
        print(format!("replayed {}, refused {}\n", round.sent, round.refused.len()).as_bytes())?;
    }
    ended?;
    match round.refused.first() {
        None => Ok(ExitCode::Done),
        Some(first) => Err(Halt {
            code: ExitCode::Undeliverable,
            what: first.clone(),
            remedy: "remove the cause and replay it again; it stays where it is".to_owned(),
        }),
    }
}

struct Round<'a> {
    place: &'a Place,
    replayer: Replayer<'a>,
    sent: u64,
    refused: Vec<String>,
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
                self.refused.push(what);
                Ok(None)
            }
        }
    }

    async fn one(&mut self, store: &mut Store, kept: &Kept) -> Result<(), Halt> {
        let Some(moment) = self.send(kept).await? else { return Ok(()) };
        match store {
            Store::Table(letters) => mark(letters, kept, &moment).await,
            Store::Topic(letters) => {
                let note = format!(
                    "the topic keeps it: `replay --all` sends it again unless the group {} is past it\n",
                    letters.group
                );
                print(note.as_bytes()).map(|_| ())
            }
        }
    }

    async fn all_of_table(&mut self, letters: &mut Letters) -> Result<(), Halt> {
        let whose = self.place.whose();
        let mut last: Option<String> = None;
        while let Some(kept) = letters.next_waiting(&whose, last.as_deref()).await.map_err(source_halt)? {
            if let Some(moment) = self.send(&kept).await? {
                mark(letters, &kept, &moment).await?;
            }
            last = Some(kept.id);
        }
        Ok(())
    }

    /// In each partition up to the first that is refused again, since an offset passes all before it.
    async fn all_of_topic(&mut self, letters: &TopicLetters) -> Result<(), Halt> {
        for (partition, span) in &letters.spans {
            let range = BTreeMap::from([(*partition, (span.replayed, span.high))]);
            let mut reading = letters.read(range).map_err(sink_halt)?;
            // Letters of others are passed over.
            let (mut passed, mut committed) = (span.replayed, span.replayed);
            while let Some(found) = reading.next().await.map_err(sink_halt)? {
                if found.ours {
                    if self.send(&found.kept).await?.is_none() {
                        break;
                    }
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

async fn mark(letters: &mut Letters, kept: &Kept, moment: &str) -> Result<(), Halt> {
    letters.mark_replayed(&kept.id, moment).await.map_err(|failure| {
        let halt = source_halt(failure);
        let what = format!("the dead letter {} was delivered and could not be marked so: {}", kept.id, halt.what);
        Halt { what, ..halt }
    })
}
