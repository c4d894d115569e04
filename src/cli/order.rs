//! `outboxd pause` and `outboxd resume`: tells a running outboxd at its admin address.

use super::OrderArgs;
use super::ask::{self, Asked};
use crate::failure::{ExitCode, Halt};

pub async fn run(args: OrderArgs, verb: &str) -> Result<ExitCode, Halt> {
    let path = match args.name.split_once('/') {
        Some((pipeline, publisher)) => format!("/pipelines/{}/publishers/{}/{verb}", part(pipeline), part(publisher)),
        None => format!("/pipelines/{}/{verb}", part(&args.name)),
    };
    let token = match args.admin_token.map(|token| token.reveal()).transpose() {
        Ok(token) => token,
        Err(error) => return Err(error.into()),
    };
    let asked = Asked { address: &args.admin, method: "POST", path: &path, token: token.as_deref() };
    let failed = |what: String| Halt {
        code: ExitCode::Unexpected,
        what: format!("`{}` was not told to {verb}: {what}", args.name),
        remedy: "outboxd status shows what runs there; the address is --admin, the token --admin-token".to_owned(),
    };
    let answer = ask::ask(&asked).await.map_err(failed)?;
    match answer.status {
        200 => super::print(format!("{verb}d {}\n", args.name).as_bytes()),
        _ => Err(failed(answer.body.trim().to_owned())),
    }
}

fn part(name: &str) -> impl std::fmt::Display + '_ {
    percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC)
}
