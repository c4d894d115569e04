//! What the definitions of options say of themselves.

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

/// An option's key in the file: its flag's name, or a positional's in kebab case.
pub(super) fn key(arg: &Arg) -> String {
    arg.get_long().map_or_else(|| arg.get_id().as_str().replace('_', "-"), str::to_owned)
}
