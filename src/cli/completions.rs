//! `outboxd completions SHELL`.

use clap_complete::Shell;

/// The shell's completion script.
pub fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut super::command(), "outboxd", &mut script);
    script
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_shell_completes_the_flags() {
        for shell in Shell::value_variants() {
            let script = String::from_utf8(script(*shell)).unwrap();
            assert!(script.contains("max-in-flight-bytes"), "{shell}");
        }
    }

    #[test]
    fn every_command_and_flag_is_completed() {
        let definitions = super::super::command();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(script(shell)).unwrap();
            let shown = definitions.get_subcommands().filter(|command| !command.is_hide_set());
            for command in shown.flat_map(|command| std::iter::once(command).chain(command.get_subcommands())) {
                assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
                for option in command.get_arguments().filter_map(|argument| argument.get_long()) {
                    assert!(script.contains(option), "{shell}: --{option} of {}", command.get_name());
                }
            }
        }
    }

    #[test]
    fn the_common_shells_complete_values() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            assert!(String::from_utf8(script(shell)).unwrap().contains("debezium"), "{shell}");
        }
    }
}
