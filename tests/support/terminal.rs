//! `outboxd` as a person meets it: on a terminal.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{PATIENCE, eventually};

/// A process whose stdin, stdout and stderr are a terminal of 100 columns. Killed when dropped.
pub struct Terminal {
    child: Child,
    keys: File,
    screen: Arc<Mutex<Vec<u8>>>,
    reading: Option<std::thread::JoinHandle<()>>,
}

impl Terminal {
    pub fn run(arguments: &[&str]) -> Self {
        Self::run_with(arguments, &[])
    }

    pub fn run_with(arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let size = Winsize { ws_row: 40, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).expect("a terminal");
        let another = || Stdio::from(pty.slave.try_clone().expect("one more handle of the terminal"));
        let child = Command::new(env!("CARGO_BIN_EXE_outboxd"))
            .args(arguments)
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR")
            .envs(variables.iter().copied())
            .stdin(another())
            .stdout(another())
            .stderr(another())
            .spawn()
            .expect("outboxd starts");
        // Its end is seen only when nobody else holds the terminal's other side.
        drop(pty.slave);
        let mut output = File::from(pty.master.try_clone().expect("one more handle of the terminal"));
        let screen = Arc::<Mutex<Vec<u8>>>::default();
        let seen = screen.clone();
        let reading = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // The terminal's other side is closed with an error.
            while let Ok(read) = output.read(&mut bytes) {
                if read == 0 {
                    return;
                }
                seen.lock().expect("the screen").extend_from_slice(&bytes[..read]);
            }
        });
        Terminal { child, keys: File::from(pty.master), screen, reading: Some(reading) }
    }

    /// Everything that was written so far, as it came.
    pub fn screen(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().expect("the screen")).into_owned()
    }

    pub async fn until(&self, words: &str) -> String {
        let what = format!("`{words}` on the screen");
        eventually(PATIENCE, &what, async || Some(self.screen()).filter(|screen| screen.contains(words))).await
    }

    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("keys can be pressed");
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("it is there to be signalled");
    }

    /// Waits until it ends by itself; its code, and all it wrote.
    pub async fn ends(mut self) -> (i32, String) {
        let status: ExitStatus =
            eventually(PATIENCE, "it ends", async || self.child.try_wait().expect("it can be waited for")).await;
        if let Some(reading) = self.reading.take() {
            // What it wrote last may still be under way.
            eventually(Duration::from_secs(20), "all is read", async || reading.is_finished().then_some(())).await;
        }
        (status.code().unwrap_or(-1), self.screen())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            println!("the screen:\n{:?}", self.screen());
        }
    }
}
