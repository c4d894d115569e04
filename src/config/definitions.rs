//! What the definitions of options say of themselves.

use std::ffi::OsStr;

use clap::builder::Resettable;
use clap::{Arg, Args, Command, FromArgMatches};

/// The defaults of a set of options: what an empty command line in an empty environment gives.
pub(super) fn defaults<O: Args + FromArgMatches + Default>() -> O {
    let definitions = O::augment_args(Command::new("defaults").no_binary_name(true));
    let parsed = definitions.mut_args(without_environment).try_get_matches_from(std::iter::empty::<&str>());
    // The definitions are fixed and nothing is required: a test holds this.
    parsed.and_then(|matches| O::from_arg_matches(&matches)).unwrap_or_default()
}

pub(crate) fn without_environment(arg: Arg) -> Arg {
    arg.env(Resettable::Reset)
}

/// The definitions' keys in the file.
pub(super) fn keys<O: Args>() -> Vec<String> {
    definitions::<O>().iter().map(key).filter(|key| key != "config").collect()
}

pub(crate) fn definitions<O: Args>() -> Vec<Arg> {
    O::augment_args(Command::new("definitions")).get_arguments().cloned().collect()
}

/// What an option is called now that was called so once.
pub(super) fn renamed<O: Args>(once: &str) -> Option<String> {
    let called = |arg: &Arg| arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&once));
    definitions::<O>().iter().find(|arg| called(arg)).map(key)
}

/// The option with the variable that says something: its own, or that of a name it had once. One that is set to nothing
/// says nothing.
pub(crate) fn environment(arg: Arg) -> Arg {
    let says = |name: &OsStr| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let Some(own) = arg.get_env() else { return arg };
    if says(own) {
        return arg;
    }
    let variable = |alias: &str| format!("OUTBOXD_{}", alias.replace('-', "_").to_uppercase());
    let mut once = arg.get_all_aliases().unwrap_or_default().into_iter().map(variable);
    match once.find(|name| says(OsStr::new(name))) {
        // The definitions last as long as the program.
        Some(name) => arg.env(&*name.leak()),
        None => without_environment(arg),
    }
}

/// An option's key in the file: its flag's name, or a positional's in kebab case.
pub(super) fn key(arg: &Arg) -> String {
    arg.get_long().map_or_else(|| arg.get_id().as_str().replace('_', "-"), str::to_owned)
}
