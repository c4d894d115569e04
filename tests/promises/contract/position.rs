//! `outboxd position`: a person sets a pipeline ahead or back, and it really goes on there, with a record of who and why.

use serde_json::Value;

use crate::support::{Ended, Outbox, OutboxWriter, Relay, Source, Topic, TopicReader, outboxd};

struct Stood {
    outbox: Outbox,
    topic: Topic,
    reader: TopicReader,
    writer: OutboxWriter,
    /// How the checkpoint is kept, for all commands.
    flags: Vec<String>,
}

impl Stood {
    /// A pipeline that has run once, and stands at the end of the log.
    async fn create(source: Source, flags: &[&str]) -> Self {
        let outbox = Outbox::create(source).await;
        let topic = Topic::create(1).await;
        let (reader, writer) = (topic.reader(), outbox.writer().await);
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let stood = Stood { outbox, topic, reader, writer, flags };
        stood.catch_up().await;
        stood
    }

    fn flags(&self) -> Vec<&str> {
        self.flags.iter().map(String::as_str).collect()
    }

    async fn catch_up(&self) {
        let flags = [&self.flags()[..], &["--until-caught-up"]].concat();
        self.outbox.relay(&self.topic, &flags).exits_with(0).await;
    }

    fn running(&self) -> Relay {
        self.outbox.relay(&self.topic, &self.flags())
    }

    /// As many events, each in a commit of its own.
    async fn add(&self, events: usize) {
        for _ in 0..events {
            self.writer.commit(&["k"]).await;
        }
    }

    /// The numbers that have come since the last look.
    async fn arrived(&mut self) -> Vec<u64> {
        let number = |record: &crate::support::Record| {
            let payload: Value = serde_json::from_str(record.value.as_deref().unwrap_or_default()).expect("JSON");
            payload["seq"].as_u64().unwrap_or_else(|| panic!("no number in {payload}"))
        };
        self.reader.rest().await.iter().map(number).collect()
    }

    /// Runs `outboxd position`; its code, and all it wrote.
    async fn position(&self, arguments: &[&str]) -> (i32, String) {
        let ended = self.command(arguments).await;
        (ended.code, format!("{}{}", ended.stdout, ended.stderr))
    }

    async fn command(&self, arguments: &[&str]) -> Ended {
        let url = self.outbox.url();
        // The checkpoint may be in Kafka.
        let brokers = ["--brokers", self.topic.brokers.as_str()];
        let all = [&["position"][..], arguments, &[url.as_str()], &brokers[..], &self.flags()[..]].concat();
        outboxd(&all).await
    }

    async fn set(&self, position: &str) -> String {
        let (code, text) = self.position(&["set", position, "--reason", "it must be", "--yes"]).await;
        assert_eq!(code, 0, "{text}");
        text
    }

    /// What `now` would be.
    async fn now(&self) -> String {
        let (code, text) = self.position(&["set", "now", "--reason", "to see", "--dry-run"]).await;
        let to = text.lines().find_map(|line| line.strip_prefix("to ")).map(str::trim);
        assert_eq!(code, 0, "{text}");
        to.unwrap_or_else(|| panic!("no position in {text}")).to_owned()
    }

    async fn shown(&self) -> Value {
        let ended = self.command(&["show", "--json"]).await;
        assert!(ended.code == 0 && ended.stderr.is_empty(), "{ended:?}");
        let shown: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
        shown[0].clone()
    }

    /// Of each record: action, where from, where to, why, who.
    async fn audit(&self) -> Vec<[String; 5]> {
        if self.outbox.source == Source::MongoDb {
            return self.outbox.mongodb().audit().await;
        }
        let exists = "SELECT count(*) FROM information_schema.tables WHERE table_name = 'outboxd_audit' AND ";
        let here = match self.outbox.source.is_postgres() {
            true => "table_schema = 'public'",
            false => "table_schema = DATABASE()",
        };
        if self.outbox.text(&format!("{exists}{here}")).await.as_deref() == Some("0") {
            return Vec::new();
        }
        let count = self.outbox.text("SELECT count(*) FROM outboxd_audit").await.expect("a number");
        let mut records = Vec::new();
        for at in 0..count.parse::<usize>().expect("a number") {
            let mut record: [String; 5] = Default::default();
            let who = "concat(database_user, ' ', os_user)";
            for (field, name) in record.iter_mut().zip(["action", "position_from", "position_to", "reason", who]) {
                let query = format!("SELECT {name} FROM outboxd_audit ORDER BY id LIMIT 1 OFFSET {at}");
                *field = self.outbox.text(&query).await.unwrap_or_default();
            }
            records.push(record);
        }
        records
    }
}

promised!(position_set_ahead_skips_what_lies_between_and_a_run_goes_on_there to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn position_set_ahead_skips_what_lies_between_and_a_run_goes_on_there(source: Source) {
    let mut stood = Stood::create(source, &[]).await;
    stood.add(1).await;
    stood.catch_up().await;
    assert_eq!(stood.arrived().await, [1]);
    let before = stood.shown().await["position"].as_str().expect("a position").to_owned();
    stood.add(2).await;
    let to = stood.now().await;
    stood.add(1).await;
    assert_eq!(stood.audit().await.len(), 0, "looking leaves no record");
    assert_eq!(stood.shown().await["position"].as_str(), Some(before.as_str()), "looking changes nothing");

    let told = stood.set(&to).await;
    assert!(told.contains("2 events, which will never be delivered"), "{told}");
    assert!(told.contains("the position was set by hand"), "the log tells of it: {told}");
    let audit = stood.audit().await;
    let [[action, from, recorded, reason, who]] = &audit[..] else { panic!("{audit:?}") };
    assert_eq!((action.as_str(), from.as_str(), reason.as_str()), ("position set", before.as_str(), "it must be"));
    assert_eq!(*recorded, to);
    let host = nix::unistd::gethostname().expect("a name").into_string().expect("a name");
    assert!(who.ends_with(&format!("@{host}")) && !who.starts_with(' '), "{who}");

    stood.catch_up().await;
    assert_eq!(stood.arrived().await, [4], "2 and 3 are skipped, and nothing else is");
    stood.add(1).await;
    stood.catch_up().await;
    assert_eq!(stood.arrived().await, [5]);
}

promised!(position_set_back_delivers_once_more_what_lies_between to mysql, mariadb, mongodb);

async fn position_set_back_delivers_once_more_what_lies_between(source: Source) {
    let mut stood = Stood::create(source, &[]).await;
    stood.add(1).await;
    stood.catch_up().await;
    let to = stood.now().await;
    stood.add(3).await;
    stood.catch_up().await;
    assert_eq!(stood.arrived().await, [1, 2, 3, 4]);
    let told = stood.set(&to).await;
    assert!(told.contains("3 events, which will be delivered once more"), "{told}");
    stood.catch_up().await;
    assert_eq!(stood.arrived().await, [2, 3, 4]);
    stood.catch_up().await;
    assert_eq!(stood.arrived().await, [0; 0], "once more, and not again and again");

    // Where the log can still be entered.
    let shown = stood.shown().await;
    assert!(shown["log_begins"].is_string() && shown["log_ends"].is_string(), "{shown}");
    stood.add(1).await;
    stood.set("now").await;
    stood.catch_up().await;
    assert_eq!(stood.arrived().await, [0; 0]);
}

promised!(position_is_not_set_under_a_running_instance to postgres, mysql, mariadb, mongodb);

async fn position_is_not_set_under_a_running_instance(source: Source) {
    let stood = Stood::create(source, &[]).await;
    let mut relay = stood.running();
    relay.until_state("streaming").await;
    let shown = stood.shown().await;
    assert!(shown["held_by"].is_string(), "{shown}");
    let (code, told) = stood.position(&["set", "now", "--reason", "no", "--yes"]).await;
    assert!(code == 7 && told.contains("stop it first"), "{code}: {told}");
    assert_eq!(stood.audit().await.len(), 0);
    relay.stop().await;
    assert!(stood.shown().await["held_by"].is_null());
    stood.set("now").await;
}

promised!(position_is_set_only_for_who_agrees_and_says_why to postgres, mysql, mongodb);

async fn position_is_set_only_for_who_agrees_and_says_why(source: Source) {
    let stood = Stood::create(source, &[]).await;
    stood.add(1).await;
    let before = stood.shown().await["position"].clone();
    for (arguments, words) in [
        (&["set", "now", "--reason", "why"][..], "no terminal to ask on"),
        (&["set", "now", "--yes"], "--reason"),
        (&["set", "now", "--yes", "--reason", " "], "says nothing"),
        (&["set", "nonsense", "--yes", "--reason", "why"], "is not a"),
        (&["set", "now", "--yes", "--reason", "why", "--publisher", "nobody"], "has no publisher `nobody`"),
    ] {
        let (code, told) = stood.position(arguments).await;
        assert!(code == 2 && told.contains(words), "{code}: {told}");
    }
    assert_eq!(stood.shown().await["position"], before);
    assert_eq!(stood.audit().await.len(), 0);
    let (code, told) = stood.position(&["set", "now", "--yes", "--reason", "why", "--name", "never-run"]).await;
    // A name of its own has a slot of another's, or no position at all.
    assert!(source.is_postgres() || code == 3 && told.contains("has no position yet"), "{code}: {told}");
}

promised!(position_is_set_wherever_it_is_kept to mysql, mongodb);

async fn position_is_set_wherever_it_is_kept(source: Source) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = format!("file:{}", folder.path().join("checkpoint").display());
    for place in ["kafka", &file] {
        let mut stood = Stood::create(source, &["--checkpoint", place]).await;
        stood.add(1).await;
        stood.catch_up().await;
        stood.add(2).await;
        let to = stood.now().await;
        stood.add(1).await;
        stood.set(&to).await;
        let shown = stood.shown().await;
        assert_eq!(shown["position"].as_str(), Some(to.as_str()), "{place}: {shown}");
        stood.catch_up().await;
        assert_eq!(stood.arrived().await, [1, 4], "{place}");
        assert_eq!(stood.audit().await.len(), 1, "{place}: the record is in the source");
    }
}
