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
    fn the_common_shells_complete_values() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            assert!(String::from_utf8(script(shell)).unwrap().contains("debezium"), "{shell}");
        }
    }
}
