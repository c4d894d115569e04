//! `outboxd man [COMMAND]`: the manual pages, in roff.

use std::path::Path;

use clap_mangen::Man;

use crate::failure::{ExitCode, Halt};

/// The page of outboxd, or of one of its commands.
pub fn page(subcommand: Option<&str>) -> Result<Vec<u8>, Halt> {
    // `help` is told of by none of them, and has none.
    let mut command = super::command().disable_help_subcommand(true);
    // Fills in the full names, `outboxd-run` for one.
    command.build();
    let described = match subcommand {
        None => &command,
        // `dlq list`, or as the page is called: `dlq-list`.
        Some(name) => name
            .split([' ', '-'])
            .try_fold(&command, |within, word| within.find_subcommand(word))
            .ok_or_else(|| unknown(&command, name))?,
    };
    let mut page = Vec::new();
    let written = Man::new(described.clone()).render(&mut page);
    written.map_err(|error| super::unexpected(format!("cannot write the manual page: {error}")))?;
    Ok(page)
}

/// Writes the pages of outboxd and of all its commands, for who packs it.
pub fn write_all(folder: &Path) -> Result<ExitCode, Halt> {
    clap_mangen::generate_to(super::command(), folder).map_err(|error| Halt {
        code: ExitCode::Usage,
        what: format!("cannot write manual pages to {}: {error}", folder.display()),
        remedy: "name a folder that is there and may be written to".to_owned(),
    })?;
    Ok(ExitCode::Done)
}

fn unknown(command: &clap::Command, name: &str) -> Halt {
    let shown = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    let names: Vec<_> = shown.map(clap::Command::get_name).collect();
    Halt {
        code: ExitCode::Usage,
        what: format!("there is no command `{name}`"),
        remedy: format!("the commands are {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page() {
        let outboxd = String::from_utf8(page(None).unwrap()).unwrap();
        assert!(outboxd.contains("outboxd\\-run"), "{outboxd}");
        for command in super::super::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = command.get_name();
            let shown = String::from_utf8(page(Some(name)).unwrap()).unwrap();
            assert!(outboxd.contains(&format!("outboxd\\-{name}")), "{name} is not on the first page");
            for option in command.get_arguments().filter_map(|argument| argument.get_long()) {
                assert!(shown.contains(&option.replace('-', "\\-")), "--{option} is not on the page of {name}");
            }
            for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help") {
                let (parted, joined) = (format!("{name} {}", inner.get_name()), format!("{name}-{}", inner.get_name()));
                assert_eq!(page(Some(&parted)).unwrap(), page(Some(&joined)).unwrap());
            }
        }
        let run = String::from_utf8(page(Some("run")).unwrap()).unwrap();
        assert!(run.contains("OUTBOXD_MAX_IN_FLIGHT") && run.contains(".TH outboxd-run"), "{run}");
    }

    #[test]
    fn all_pages_are_written_at_once() {
        let folder = tempfile::tempdir().unwrap();
        write_all(folder.path()).unwrap();
        for name in ["outboxd", "outboxd-run", "outboxd-dlq", "outboxd-dlq-replay"] {
            let written = std::fs::read(folder.path().join(format!("{name}.1"))).unwrap();
            let printed = page(name.strip_prefix("outboxd-")).unwrap();
            assert!(written == printed, "{name}");
        }
        assert!(!folder.path().join("outboxd-config-reference.1").exists(), "it is hidden");
        assert_eq!(write_all(&folder.path().join("none")).unwrap_err().code, ExitCode::Usage);
    }

    #[test]
    fn an_unknown_command_has_none() {
        assert_eq!(page(Some("fly")).unwrap_err().code, ExitCode::Usage);
    }
}
