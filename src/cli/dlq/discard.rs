//! Letters that are deleted.

use std::io::{BufRead as _, IsTerminal as _, Write as _, stderr, stdin};
use std::time::Duration;

use super::{Place, Store, sink_halt, source_halt, usage};
use crate::cli::print;
use crate::dead_letters::{Chosen, Whose};
use crate::failure::{ExitCode, Halt};

pub async fn run(
    mut store: Store,
    place: &Place,
    all: bool,
    older_than: Duration,
    yes: bool,
) -> Result<ExitCode, Halt> {
    if !yes && !stdin().is_terminal() {
        return Err(usage("there is no terminal to ask on whether letters may be deleted", "say --yes"));
    }
    let (whose, chosen) = (place.whose(), Chosen { all, older_than });
    let from = place.publisher().dead_letter.describe();
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

/// Whether there is something to delete, and it may be.
fn agreed(letters: u64, whose: &Whose, from: &str, yes: bool) -> Result<bool, Halt> {
    if letters == 0 {
        print(format!("nothing to delete from {from}\n").as_bytes())?;
        return Ok(false);
    }
    if yes {
        return Ok(true);
    }
    let mut answer = String::new();
    let mut ask = stderr().lock();
    let _ = write!(ask, "Delete {letters} dead letters of pipeline {} from {from}? [y/N] ", whose.pipeline);
    let _ = ask.flush();
    let _ = stdin().lock().read_line(&mut answer);
    let agreed = matches!(answer.trim(), "y" | "Y" | "yes");
    if !agreed {
        print(b"nothing was deleted\n")?;
    }
    Ok(agreed)
}
