//! A real Chromium, told what to do by tests/browser/driver.js.

use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::PATIENCE;
use super::tools::{tests_folder, tool};

/// Ended when dropped.
pub struct Browser {
    _child: Child,
    to: ChildStdin,
    from: Lines<BufReader<ChildStdout>>,
}

impl Browser {
    /// Opens a page.
    pub async fn open(url: &str) -> Self {
        let modules = tool(&["browser"]).await.join("node_modules");
        let mut child = Command::new("node")
            .arg(tests_folder().join("browser/driver.js"))
            .env("NODE_PATH", modules)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("node runs: tests/prerequisites");
        let (to, from) = (child.stdin.take().expect("it reads"), child.stdout.take().expect("it writes"));
        let mut browser = Browser { _child: child, to, from: BufReader::new(from).lines() };
        browser.told(json!({ "do": "open", "url": url })).await;
        browser
    }

    /// Has the driver do something; fails with what it says when it cannot.
    async fn told(&mut self, what: Value) -> Value {
        self.to.write_all(format!("{what}\n").as_bytes()).await.expect("the driver listens");
        let answer = tokio::time::timeout(PATIENCE + Duration::from_secs(60), self.from.next_line()).await;
        let line = answer.expect("the driver answers in time").expect("it can be read").expect("the driver runs");
        let answer: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert!(answer["error"].is_null(), "{what}: {}", answer["error"].as_str().unwrap_or_default());
        answer["value"].clone()
    }

    /// Waits until an element of this selector is on screen and has this text in it.
    pub async fn see(&mut self, selector: &str, text: &str) {
        self.told(json!({ "do": "see", "selector": selector, "text": text })).await;
    }

    /// Waits until no such element is on screen.
    pub async fn miss(&mut self, selector: &str) {
        self.told(json!({ "do": "miss", "selector": selector })).await;
    }

    pub async fn text(&mut self, selector: &str) -> String {
        self.told(json!({ "do": "text", "selector": selector })).await.as_str().expect("a text").to_owned()
    }

    /// The attribute of an element.
    pub async fn attribute(&mut self, selector: &str, name: &str) -> String {
        let value = self.told(json!({ "do": "attribute", "selector": selector, "name": name })).await;
        value.as_str().unwrap_or_default().to_owned()
    }

    pub async fn click(&mut self, selector: &str) {
        self.told(json!({ "do": "click", "selector": selector })).await;
    }

    /// Goes there by the tabulator key, as people do who have no mouse, and presses this key on it.
    pub async fn press(&mut self, selector: &str, key: &str) {
        self.told(json!({ "do": "press", "selector": selector, "key": key })).await;
    }

    /// Writes into what has the focus.
    pub async fn write(&mut self, text: &str) {
        self.told(json!({ "do": "write", "text": text })).await;
    }

    pub async fn reload(&mut self) {
        self.told(json!({ "do": "reload" })).await;
    }

    /// What axe finds to be serious or worse, in light and in dark.
    pub async fn barriers(&mut self) -> Vec<Value> {
        self.told(json!({ "do": "axe" })).await.as_array().expect("a list").clone()
    }

    /// Every address that was asked, and what went wrong in the page.
    pub async fn requests_and_errors(&mut self) -> (Vec<String>, Vec<String>) {
        let value = self.told(json!({ "do": "log" })).await;
        let texts = |name: &str| {
            value[name]
                .as_array()
                .expect("a list")
                .iter()
                .map(|one| one.as_str().unwrap_or_default().to_owned())
                .collect()
        };
        (texts("requests"), texts("errors"))
    }

    /// Whether a page of another place, in the same browser, gets anywhere with such a request.
    pub async fn from_elsewhere(&mut self, page: &str, method: &str, url: &str) -> Value {
        self.told(json!({ "do": "elsewhere", "page": page, "method": method, "url": url })).await
    }

    pub async fn picture(&mut self, path: &str) {
        self.told(json!({ "do": "picture", "path": path })).await;
    }
}
