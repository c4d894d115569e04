//! Programs that tests run, which `tests/services` fetches where they are missing.

use std::path::PathBuf;
use std::process::Command;

/// Where promtool, prometheus or docker-compose is.
pub fn tool(name: &str) -> PathBuf {
    let services = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/services");
    let asked = Command::new(services).args(["tool", name]).output().expect("tests/services runs");
    assert!(asked.status.success(), "no {name}: {}", String::from_utf8_lossy(&asked.stderr));
    PathBuf::from(String::from_utf8(asked.stdout).expect("a path").trim_end())
}
