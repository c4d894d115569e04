//! Letters that are deleted.

use std::io::{BufRead as _, IsTerminal as _, Write as _, stderr, stdin};

use super::{Place, Store, sink_halt, source_halt, usage};
use crate::cli::print;
use crate::dead_letters::{Chosen, Whose};
use crate::failure::{ExitCode, Halt};

pub async fn run(
    mut store: Store,
    place: &Place,
    id: Option<&str>,
    chosen: Chosen,
    yes: bool,
) -> Result<ExitCode, Halt> {
    if !yes && !stdin().is_terminal() {
        return Err(usage("there is no terminal to ask on whether letters may be deleted", "say --yes"));
    }
    let whose = place.whose();
    let from = place.publisher().dead_letter.describe();
    if let Some(id) = id {
        return one(store, &whose, id, &from, yes).await;
    }
    let deleted = match &mut store {
        Store::Table(letters) => {
            let found = letters.count(&whose, &chosen).await.map_err(source_halt)?;
            if !agreed(found.letters, &whose, &from, yes)? {
                return Ok(ExitCode::Done);
            }
            letters.discard(&whose, &chosen, &found.last).await.map_err(source_halt)?
        }
        Store::Topic(letters) => {
            let (found, upto) = letters.count(&chosen).await.map_err(sink_halt)?;
            if !agreed(found, &whose, &from, yes)? {
                return Ok(ExitCode::Done);
            }
            letters.discard(&upto).await.map_err(sink_halt)?;
            found
        }
    };
    print(format!("deleted {deleted} from {from}\n").as_bytes())
}

/// Deletes one letter, whether it was replayed or not.
async fn one(mut store: Store, whose: &Whose, id: &str, from: &str, yes: bool) -> Result<ExitCode, Halt> {
    let kept = store.find(whose, id).await?;
    let Store::Table(letters) = &mut store else {
        let what = "a topic's records can only be deleted from the beginning, not one by one";
        return Err(usage(what, "purge without an ID, or leave it to the topic's retention.ms"));
    };
    let unsent = if kept.replayed { "" } else { ", which was not replayed," };
    let question = format!("Delete the dead letter {id}{unsent} of pipeline {} from {from}?", whose.pipeline);
    if !yes && !asked(&question)? {
        return Ok(ExitCode::Done);
    }
    let deleted = letters.remove(whose, id).await.map_err(source_halt)?;
    print(format!("deleted {deleted} from {from}\n").as_bytes())
}

/// Whether there is something to delete, and it may be.
fn agreed(letters: u64, whose: &Whose, from: &str, yes: bool) -> Result<bool, Halt> {
    if letters == 0 {
        print(format!("nothing to delete from {from}\n").as_bytes())?;
        return Ok(false);
    }
    let question = format!("Delete {letters} dead letters of pipeline {} from {from}?", whose.pipeline);
    Ok(yes || asked(&question)?)
}

/// Asks a person.
fn asked(question: &str) -> Result<bool, Halt> {
    let mut answer = String::new();
    let mut ask = stderr().lock();
    let _ = write!(ask, "{question} [y/N] ");
    let _ = ask.flush();
    let _ = stdin().lock().read_line(&mut answer);
    let agreed = matches!(answer.trim(), "y" | "Y" | "yes");
    if !agreed {
        print(b"nothing was deleted\n")?;
    }
    Ok(agreed)
}
