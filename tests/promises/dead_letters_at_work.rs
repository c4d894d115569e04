//! Dead letters day by day: how many wait, in which order they go again, who replays them, and how they are got rid of.

use std::collections::HashSet;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mongodb::bson::doc;
use serde_json::Value;

use crate::promises::dead_letters::{Pipeline, id, in_database, insert, of, outbox};
use crate::support::{Answer, Form, HttpServer, PATIENCE, Polled, Relay, Request, Source, Topic, eventually, outboxd};

/// For each database.
macro_rules! in_each_database {
    ($($promise:ident),+ $(,)?) => {
        $(mod $promise {
            use super::*;
            #[tokio::test(flavor = "multi_thread")]
            async fn postgres() { Box::pin(super::$promise(Source::Postgres)).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn mysql() { Box::pin(super::$promise(Source::MySql)).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn mariadb() { Box::pin(super::$promise(Source::MariaDb)).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn mongodb() { Box::pin(super::$promise(Source::MongoDb)).await }
        })+
    };
}

in_each_database!(
    how_many_letters_wait_is_a_gauge_that_falls_when_they_are_replayed,
    letters_behind_a_refused_one_of_their_key_wait_for_it_and_others_do_not,
    a_letter_that_is_being_replayed_is_not_sent_by_another,
    letters_are_listed_page_by_page_and_deleted_one_by_one,
    a_polled_row_is_done_when_its_letter_was_replayed_unless_somebody_has_reset_it,
);

/// What a server refuses, and whether it answers at all.
#[derive(Default)]
struct Mood {
    refuses: std::sync::Mutex<Vec<&'static str>>,
    silent: AtomicBool,
}

impl Mood {
    fn refuse(&self, ids: &[&'static str]) {
        *self.refuses.lock().expect("nobody panicked") = ids.to_vec();
    }

    fn answer(&self, request: &Request) -> Answer {
        let refused = |id: &&str| ids_of(request).iter().any(|sent| sent == *id);
        if self.refuses.lock().expect("nobody panicked").iter().any(refused) {
            return Answer::Status(422);
        }
        if self.silent.load(Ordering::Relaxed) { Answer::Silence } else { Answer::Status(200) }
    }
}

/// The ids of the events of a request of the form `events`.
fn ids_of(request: &Request) -> Vec<String> {
    let events = request.json();
    let ids = events.as_array().expect("an array").iter().map(|event| event["headers"]["id"].clone());
    ids.map(|id| id.as_str().expect("an id").to_owned()).collect()
}

/// An HTTP API in a mood, and a pipeline to it that gives up at once.
struct Setting {
    mood: Arc<Mood>,
    server: HttpServer,
    outbox: crate::support::Outbox,
    pipeline: Pipeline,
}

impl Setting {
    async fn new(source: Source, place: &str, more: &[&str]) -> Self {
        let outbox = outbox(source).await;
        let mood = Arc::new(Mood::default());
        let moody = mood.clone();
        let server = HttpServer::start(move |request| moody.answer(request)).await;
        let sink = server.url();
        let flags = ["--sink", &sink, "--http-body", "events", "--max-retries", "0", "--dead-letter", place];
        let patience = ["--http-timeout", "1s", "--http-batch", "1"];
        let pipeline = Pipeline::new(&outbox.url(), &[&flags[..], &patience, more].concat());
        Setting { mood, server, outbox, pipeline }
    }

    /// Makes letters of these events, in this order.
    async fn park(&self, events: &[(&'static str, &str)]) -> Relay {
        let ids: Vec<_> = events.iter().map(|(id, _)| *id).collect();
        self.mood.refuse(&ids);
        let relay = self.pipeline.run().await;
        for (at, (id, key)) in events.iter().enumerate() {
            insert(&self.outbox, id, key, b"{}").await;
            self.pipeline.until_listed(at + 1).await;
        }
        relay
    }

    /// Events that the server has taken, in order.
    fn taken(&self) -> Vec<String> {
        self.server.taken().iter().flat_map(ids_of).collect()
    }
}

async fn gauge(relay: &Relay) -> Option<u64> {
    let page = relay.get("/metrics").await;
    let line = page.lines().find(|line| line.starts_with("outboxd_dead_letters_waiting{"))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

async fn until_gauge(relay: &Relay, expected: u64) {
    eventually(PATIENCE, &format!("{expected} letters wait"), async || {
        (gauge(relay).await == Some(expected)).then_some(())
    })
    .await;
    assert_eq!(relay.status().await["dead_letters_waiting"], expected);
}

async fn how_many_letters_wait_is_a_gauge_that_falls_when_they_are_replayed(source: Source) {
    falls(Setting::new(source, in_database(source), &[]).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn how_many_letters_wait_in_a_topic_is_a_gauge_as_well() {
    let topic = Topic::create(2).await;
    let place = format!("topic:{}", topic.name);
    falls(Setting::new(Source::Postgres, &place, &["--brokers", &topic.brokers]).await).await;
}

async fn falls(setting: Setting) {
    let relay = setting.park(&[("a", "k"), ("b", "l")]).await;
    until_gauge(&relay, 2).await;
    setting.mood.refuse(&["c"]);
    let (code, text) = setting.pipeline.dlq(&["replay", "--all"]).await;
    assert_eq!(code, 0, "{text}");
    insert(&setting.outbox, "c", "k", b"{}").await;
    until_gauge(&relay, 1).await;
    relay.stop().await;
    // Letters of before the start count as well.
    let relay = setting.pipeline.run().await;
    until_gauge(&relay, 1).await;
    assert_eq!(relay.status().await["dead_letters"], 0);
    relay.stop().await;
}

async fn letters_behind_a_refused_one_of_their_key_wait_for_it_and_others_do_not(source: Source) {
    let setting = Setting::new(source, in_database(source), &[]).await;
    setting.park(&[("a", "k"), ("b", "k"), ("c", "other"), ("d", "k")]).await.stop().await;
    setting.mood.refuse(&["a"]);
    let (code, text) = setting.pipeline.dlq(&["replay", "--all"]).await;
    assert!(code == 6 && text.contains("replayed 1, refused 1, 2 behind a refused one"), "{code}: {text}");
    assert_eq!(setting.taken(), ["c"]);
    setting.mood.refuse(&[]);
    let (code, text) = setting.pipeline.dlq(&["replay", "--all"]).await;
    assert!(code == 0 && text.contains("replayed 3, refused 0\n"), "{code}: {text}");
    assert_eq!(setting.taken(), ["c", "a", "b", "d"]);
}

async fn a_letter_that_is_being_replayed_is_not_sent_by_another(source: Source) {
    let setting = Setting::new(source, in_database(source), &[]).await;
    setting.park(&[("a", "k")]).await.stop().await;
    let letter = setting.pipeline.list().await.remove(0);
    setting.mood.refuse(&[]);
    setting.mood.silent.store(true, Ordering::Relaxed);
    let sent = || setting.server.requests().iter().filter(|request| request.answer == Answer::Silence).count();
    let meanwhile = async {
        eventually(PATIENCE, "the first has begun", async || (sent() > 0).then_some(())).await;
        for words in [&["replay", id(&letter)][..], &["replay", "--all"]] {
            let (code, text) = setting.pipeline.dlq(words).await;
            match (source, words) {
                // There letters are claimed one by one, and a second finds nothing to do.
                (Source::MongoDb, [_, "--all"]) => assert!(code == 0 && text.contains("replayed 0"), "{code}: {text}"),
                _ => assert_eq!(code, 7, "{text}"),
            }
            assert!(text.contains("being replayed by another"), "{text}");
        }
        setting.mood.silent.store(false, Ordering::Relaxed);
    };
    let ((code, text), ()) = tokio::join!(setting.pipeline.dlq(&["replay", "--all"]), meanwhile);
    assert!(code == 0 && text.contains("replayed 1, refused 0"), "{code}: {text}");
    assert_eq!(setting.taken(), ["a"]);
    // Nothing is left behind that would be in the way.
    let (code, text) = setting.pipeline.dlq(&["replay", id(&letter)]).await;
    assert!(code == 0 && text.contains("was replayed before"), "{code}: {text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_replays_of_a_topic_the_later_goes_on_and_one_letter_is_sent_twice() {
    let topic = Topic::create(1).await;
    let place = format!("topic:{}", topic.name);
    let setting = Setting::new(Source::Postgres, &place, &["--brokers", &topic.brokers]).await;
    let events = [("a", "k"), ("b", "k"), ("c", "k"), ("d", "k"), ("e", "k"), ("f", "k")];
    setting.park(&events).await.stop().await;
    setting.mood.refuse(&[]);
    setting.mood.silent.store(true, Ordering::Relaxed);
    // Each says in a header when it began with the letter.
    let senders = || {
        let silent = setting.server.requests().into_iter().filter(|request| request.answer == Answer::Silence);
        let moments = silent.map(|request| request.json()[0]["headers"]["outboxd.replayed"].to_string());
        moments.collect::<HashSet<_>>().len()
    };
    let words = ["replay", "--all"];
    let begun = async |count: usize| {
        eventually(PATIENCE, &format!("{count} have begun"), async || (senders() == count).then_some(())).await;
    };
    let meanwhile = async {
        begun(1).await;
        let release = async {
            begun(2).await;
            setting.mood.silent.store(false, Ordering::Relaxed);
        };
        tokio::join!(setting.pipeline.dlq(&words), release).0
    };
    let (one, other) = tokio::join!(setting.pipeline.dlq(&words), meanwhile);
    assert_eq!((one.0, other.0), (7, 0), "the later one goes on: {one:?} {other:?}");
    assert!(one.1.contains("being replayed by another"), "{one:?}");
    let mut taken = setting.taken();
    assert_eq!(taken.len(), events.len() + 1, "one was sent twice: {taken:?}");
    taken.sort();
    taken.dedup();
    assert_eq!(taken, ["a", "b", "c", "d", "e", "f"]);
    assert!(setting.pipeline.list().await.iter().all(|letter| letter["replayed"] == true));
}

/// The listed letters' events.
async fn listed(pipeline: &Pipeline, flags: &[&str]) -> Vec<Value> {
    let ended = outboxd(&pipeline.arguments(&[&["dlq", "list", "--json"], flags].concat())).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    ended.stdout.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
}

const FIVE: [(&str, &str); 5] = [("a", "1"), ("b", "2"), ("c", "3"), ("d", "4"), ("e", "5")];

async fn letters_are_listed_page_by_page_and_deleted_one_by_one(source: Source) {
    let setting = Setting::new(source, in_database(source), &[]).await;
    setting.park(&FIVE).await.stop().await;
    let pipeline = &setting.pipeline;
    let last = listed(pipeline, &["--limit", "2"]).await;
    assert_eq!(of(&last, "event_id"), ["d", "e"]);
    let before = listed(pipeline, &["--limit", "2", "--before", id(&last[0])]).await;
    assert_eq!(of(&before, "event_id"), ["b", "c"]);
    let first = listed(pipeline, &["--limit", "2", "--before", id(&before[0])]).await;
    assert_eq!(of(&first, "event_id"), ["a"]);
    let (code, text) = pipeline.dlq(&["list", "--before", id(&first[0])]).await;
    assert!(code == 0 && text.contains("no dead letters before that"), "{code}: {text}");
    let (code, text) = pipeline.dlq(&["list", "--before", "nonsense"]).await;
    assert!(code == 2 && text.contains("there is no dead letter `nonsense`"), "{code}: {text}");

    setting.mood.refuse(&[]);
    assert_eq!(pipeline.dlq(&["replay", id(&before[0])]).await.0, 0);
    assert_eq!(of(&listed(pipeline, &["--waiting"]).await, "event_id"), ["a", "c", "d", "e"]);

    let letter = id(&before[1]);
    for (words, said) in [
        (&["purge", letter][..], "there is no terminal"),
        (&["purge", letter, "--all", "--yes"], "name one letter, or say which"),
        (&["purge", "nonsense", "--yes"], "there is no dead letter `nonsense`"),
    ] {
        let (code, text) = pipeline.dlq(words).await;
        assert!(code == 2 && text.contains(said), "{words:?}: {code}: {text}");
    }
    assert_eq!(listed(pipeline, &[]).await.len(), 5);
    let (code, text) = pipeline.dlq(&["purge", letter, "--yes"]).await;
    assert!(code == 0 && text.contains("deleted 1"), "{code}: {text}");
    assert_eq!(of(&listed(pipeline, &[]).await, "event_id"), ["a", "b", "d", "e"]);
    let (code, text) = pipeline.dlq(&["purge", "--yes"]).await;
    assert!(code == 0 && text.contains("deleted 1"), "what was replayed: {code}: {text}");
    let (code, text) = pipeline.dlq(&["purge", "--all", "--older-than", "1h", "--yes"]).await;
    assert!(code == 0 && text.contains("nothing to delete"), "{code}: {text}");
    assert_eq!(of(&listed(pipeline, &[]).await, "event_id"), ["a", "d", "e"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn letters_of_a_topic_are_listed_page_by_page_and_not_deleted_one_by_one() {
    let topic = Topic::create(2).await;
    let place = format!("topic:{}", topic.name);
    let setting = Setting::new(Source::Postgres, &place, &["--brokers", &topic.brokers]).await;
    setting.park(&FIVE).await.stop().await;
    let pipeline = &setting.pipeline;
    // By the time of the record, which is the event's.
    let all = listed(pipeline, &[]).await;
    let last = listed(pipeline, &["--limit", "2"]).await;
    assert_eq!(of(&last, "id"), of(&all[3..], "id"));
    let before = listed(pipeline, &["--limit", "2", "--before", id(&last[0])]).await;
    assert_eq!(of(&before, "id"), of(&all[1..3], "id"));
    setting.mood.refuse(&[]);
    assert_eq!(pipeline.dlq(&["replay", "--all"]).await.0, 0);
    assert!(listed(pipeline, &["--waiting"]).await.is_empty());
    let (code, text) = pipeline.dlq(&["purge", id(&all[0]), "--yes"]).await;
    assert!(code == 2 && text.contains("from the beginning"), "{code}: {text}");
}

/// Runs outboxd on a terminal, and answers its question.
fn on_terminal(arguments: &[&str], answer: &str) -> (i32, String) {
    let quoted = |word: &&str| format!("'{}'", word.replace('\'', "'\\''"));
    let line = std::iter::once(&env!("CARGO_BIN_EXE_outboxd")).chain(arguments).map(quoted).collect::<Vec<_>>();
    let mut terminal = Command::new("script")
        .args(["--quiet", "--return", "--command", &line.join(" "), "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a terminal");
    terminal.stdin.as_mut().expect("a keyboard").write_all(format!("{answer}\n").as_bytes()).expect("it is typed");
    let ended = terminal.wait_with_output().expect("it ends");
    (ended.status.code().unwrap_or(-1), String::from_utf8_lossy(&ended.stdout).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_is_asked_before_letters_are_deleted() {
    let setting = Setting::new(Source::Postgres, "table:dead_letters", &[]).await;
    setting.park(&FIVE[..2]).await.stop().await;
    let pipeline = &setting.pipeline;
    let first = pipeline.list().await.remove(0);
    let ask =
        |words: &[&str], answer: &str| on_terminal(&pipeline.arguments(&[&["dlq", "purge"], words].concat()), answer);
    for answer in ["", "n", "what?"] {
        let (code, text) = ask(&["--all"], answer);
        assert!(code == 0 && text.contains("Delete 2 dead letters") && text.contains("nothing was deleted"), "{text}");
    }
    assert_eq!(pipeline.list().await.len(), 2);
    let (code, text) = ask(&[id(&first)], "y");
    assert!(code == 0 && text.contains("which was not replayed") && text.contains("deleted 1"), "{text}");
    let (code, text) = ask(&["--all"], "yes");
    assert!(code == 0 && text.contains("Delete 1 dead letters") && text.contains("deleted 1"), "{text}");
    assert!(pipeline.list().await.is_empty());
}

async fn a_polled_row_is_done_when_its_letter_was_replayed_unless_somebody_has_reset_it(source: Source) {
    let forms = match source {
        Source::MongoDb => &[Form::Native, Form::Entity, Form::MessageGroup][..],
        Source::Postgres => &[Form::Native, Form::Entity, Form::MessageGroup, Form::OccurredOn, Form::ProduceReceive],
        _ => &[Form::Native, Form::Entity, Form::MessageGroup, Form::ProduceReceive],
    };
    for form in forms {
        let polled = Polled::create(source, *form).await;
        let refuses = Arc::new(AtomicBool::new(true));
        let answers = refuses.clone();
        let culprit = |request: &Request| String::from_utf8_lossy(&request.body).contains("culprit");
        let server = HttpServer::start(move |request| match culprit(request) && answers.load(Ordering::Relaxed) {
            true => Answer::Status(422),
            false => Answer::Status(200),
        })
        .await;
        let row = |key: &str, n: usize| (key.to_owned(), n, format!(r#"{{"key":"{key}","n":{n},"culprit":true}}"#));
        polled.add_of(vec![row("a", 0), row("b", 0)]).await;
        // An entity says for itself how often.
        match (source, form) {
            (Source::MongoDb, Form::Entity) => {
                let collection = polled.outbox.mongodb().collection(form.table());
                collection.update_many(doc! {}, doc! { "$set": { "max_retries": 1 } }).await.expect("they are changed");
            }
            (_, Form::Entity) => polled.outbox.execute("UPDATE entities SET max_retries = 1").await,
            _ => {}
        }
        let url = server.url();
        let place = if source == Source::MongoDb { "collection:letters" } else { "table:letters" };
        let flags = ["--sink", &url, "--poll-interval", "50ms", "--retry-backoff", "50ms", "--max-retries", "1"];
        let all = [&flags[..], &["--dead-letter", place], &polled.flags()].concat();
        let pipeline = Pipeline::new(&polled.outbox.url(), &all);
        let mut relay = Relay::spawn(&pipeline.arguments(&["run"]));
        relay.until_state("streaming").await;
        let letters = eventually(PATIENCE, "both have failed", async || {
            let listed = outboxd(&pipeline.arguments(&["dlq", "list", "--json"])).await;
            let letters: Vec<Value> =
                listed.stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
            Some(letters).filter(|letters| letters.len() == 2)
        })
        .await;
        relay.stop().await;
        assert_eq!(polled.done().await, 0, "{form:?}");
        // One of them was corrected by hand and is to be polled once more.
        reset(&polled, "b").await;
        refuses.store(false, Ordering::Relaxed);
        let (code, text) = pipeline.dlq(&["replay", "--all"]).await;
        assert!(code == 0 && text.contains("replayed 2, refused 0"), "{form:?}: {code}: {text}");
        assert!(!text.contains("could not be marked"), "{form:?}: {text}");
        assert_eq!(polled.done().await, 1, "{form:?}: {letters:?}");
        let before = server.taken().len();
        let mut relay = Relay::spawn(&pipeline.arguments(&["run"]));
        relay.until_state("streaming").await;
        eventually(PATIENCE, "the other one flows again", async || (polled.done().await == 2).then_some(())).await;
        relay.stop().await;
        assert_eq!(server.taken().len(), before + 1, "{form:?}");
    }
}

/// Makes the row of a key pending, as documented.
async fn reset(polled: &Polled, key: &str) {
    if polled.outbox.source == Source::MongoDb {
        let (set, filter) = match polled.form {
            Form::MessageGroup => (doc! { "status": "PENDING", "retryCount": 0 }, doc! { "messageGroup": key }),
            Form::Entity => (doc! { "status": "pending", "retry_count": 0 }, doc! { "partition_key": key }),
            _ => (doc! { "status": "pending", "attempts": 0 }, doc! { "partition_key": key }),
        };
        let collection = polled.outbox.mongodb().collection(polled.form.table());
        collection.update_one(filter, doc! { "$set": set }).await.expect("it is reset");
        return;
    }
    let (set, filter) = match polled.form {
        Form::Native => ("status = 'pending', attempts = 0", format!("partition_key = '{key}'")),
        Form::Entity => ("status = 'pending', retry_count = 0", format!("partition_key = '{key}'")),
        Form::MessageGroup => ("status = 'PENDING', retry_count = 0", format!("message_group = '{key}'")),
        Form::OccurredOn => ("\"RetryCount\" = 0", format!("\"Content\" ->> 'key' = '{key}'")),
        Form::ProduceReceive => ("retry = 0", format!("stid = '{key}'")),
    };
    polled.outbox.execute(&format!("UPDATE {} SET {set} WHERE {filter}", polled.form.table())).await;
}
