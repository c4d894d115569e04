//! Programs of others, by `tests/tools`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

pub fn tests_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// What `tests/tools` prints; the first time it fetches what that names.
pub async fn tool(arguments: &[&str]) -> PathBuf {
    let mut command = tokio::process::Command::new(tests_folder().join("tools"));
    let ended = command.args(arguments).output().await.expect("tests/tools runs");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "tests/tools {arguments:?}: {said}");
    PathBuf::from(String::from_utf8(ended.stdout).expect("a path").trim())
}

/// Runs a script of tests/clients with these packages; what it prints is JSON.
pub async fn script(packages: &[&str], name: &str, arguments: &[&str], input: &str) -> Value {
    let python = tool(&[&["python"], packages].concat()).await;
    let mut command = Command::new(python);
    command.arg(tests_folder().join("clients").join(name)).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).env("PYTHONDONTWRITEBYTECODE", "1");
    let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn().expect("Python runs");
    let mut stdin = child.stdin.take().expect("it reads");
    let written = tokio::io::AsyncWriteExt::write_all(&mut stdin, input.as_bytes()).await;
    drop(stdin);
    let ended = child.wait_with_output().await.expect("it ends");
    let (out, err) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success() && written.is_ok(), "{name} {arguments:?}: {out}\n{err}");
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{name} {arguments:?} printed {out:?}: {error}"))
}
