//! The config file: process-level keys at the top, then one `[pipeline.NAME]` table for each pipeline.
//!
//! Each key is read on its own, so that every mistake is found in one go. Messages give line and column but never quote
//! the file, which may hold passwords.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

use clap::Args;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer};

use super::confirm_options::ConfirmOptions;
use super::options::{self, Isolation, PipelineOptions, ProcessOptions};
use super::places::Places;
use super::problem::{ConfigError, Problem, nearest};

type Entry<'a> = (Spanned<Cow<'a, str>>, Spanned<DeValue<'a>>);

/// What a file says: one layer for the process and one for each pipeline, in the file's order.
#[derive(Clone, Debug, Default)]
pub struct FileOptions {
    pub process: ProcessOptions,
    /// Where the process's keys stand.
    pub places: Places,
    pub pipelines: Vec<PipelineTable>,
}

/// A `[pipeline.NAME]` table.
#[derive(Clone, Debug, Default)]
pub struct PipelineTable {
    pub name: String,
    pub places: Places,
    pub options: PipelineOptions,
    pub publishers: Vec<PublisherTable>,
}

/// A `[pipeline.NAME.publisher.NAME]` table.
#[derive(Clone, Debug, Default)]
pub struct PublisherTable {
    pub name: String,
    pub places: Places,
    pub isolation: Isolation,
    pub options: PipelineOptions,
}

/// What is about the whole pipeline, however many publishers it has.
const PIPELINE_ONLY: [&str; 27] = [
    "source",
    "capture",
    "poll-interval",
    "poll-batch",
    "lease",
    "stuck-after",
    "worker-id",
    "publication",
    "no-create",
    "message-prefix",
    "server-id",
    "uuid-column",
    "extended-json",
    "layout",
    "mark",
    "on-lost-position",
    "delivery",
    "checkpoint",
    "checkpoint-interval",
    "prune-after",
    "prune-batch",
    "prune-also",
    "name",
    "until-caught-up",
    "no-standby",
    "shutdown-timeout",
    "stall-timeout",
];

/// Whether a key is about the whole pipeline, however many publishers it has.
pub(super) fn is_of_pipeline(key: &str) -> bool {
    PIPELINE_ONLY.contains(&key)
        || ["SOURCE", "slot", "start", "snapshot"].contains(&key)
        || options::keys::<ConfirmOptions>().iter().any(|known| known == key)
}

pub(super) fn read(path: &Path) -> Result<FileOptions, ConfigError> {
    let file = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&file, &text),
        Err(error) => Err(Problem::new(file, format!("cannot be read: {error}")).into()),
    }
}

/// Reads a config file's text; `file` is its name for messages.
pub fn parse(file: &str, text: &str) -> Result<FileOptions, ConfigError> {
    let mut reading = Reading { file, text, problems: Vec::new() };
    let (document, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        reading.problem(error.span().unwrap_or(0..0), unquoted(error.message()));
    }
    let read =
        if reading.problems.is_empty() { reading.document(document.into_inner()) } else { FileOptions::default() };
    if reading.problems.is_empty() { Ok(read) } else { Err(ConfigError { problems: reading.problems }) }
}

struct Reading<'a> {
    file: &'a str,
    text: &'a str,
    problems: Vec<Problem>,
}

impl<'a> Reading<'a> {
    fn document(&mut self, document: DeTable<'a>) -> FileOptions {
        let mut read = FileOptions::default();
        for (key, value) in in_order(document) {
            if key.get_ref() == "pipeline" {
                read.pipelines = self.pipelines(value);
            } else if options::keys::<PipelineOptions>().iter().any(|known| known == key.get_ref()) {
                let what = format!("`{}` is about a pipeline: it belongs under [pipeline.NAME]", key.get_ref());
                self.problem(key.span(), what);
            } else {
                self.note(&mut read.places, &key, &value);
                if let Some(layer) = self.option::<ProcessOptions>((key, value), &["pipeline"]) {
                    read.process = layer.over(read.process);
                }
            }
        }
        if read.pipelines.is_empty() && self.problems.is_empty() {
            self.problem(0..0, "there is no [pipeline.NAME] table".to_owned());
        }
        read
    }

    fn pipelines(&mut self, value: Spanned<DeValue<'a>>) -> Vec<PipelineTable> {
        let mut pipelines = Vec::new();
        for (name, value) in self.table(value, "pipelines are tables: [pipeline.NAME]") {
            let places = Places { table: self.place(name.span()), ..Places::default() };
            let name = name.into_inner().into_owned();
            let mut pipeline = PipelineTable { name, places, ..PipelineTable::default() };
            for (key, value) in self.table(value, "a pipeline is a table: [pipeline.NAME]") {
                if key.get_ref() == "publisher" {
                    pipeline.publishers = self.publishers(value);
                    continue;
                }
                if key.get_ref() == "confirm" {
                    pipeline.options.confirm = self.confirm(value);
                    continue;
                }
                self.note(&mut pipeline.places, &key, &value);
                if let Some(layer) = self.option::<PipelineOptions>((key, value), &["publisher", "confirm"]) {
                    pipeline.options = layer.over(pipeline.options);
                }
            }
            pipelines.push(pipeline);
        }
        pipelines
    }

    fn publishers(&mut self, value: Spanned<DeValue<'a>>) -> Vec<PublisherTable> {
        let mut publishers = Vec::new();
        let otherwise = "publishers are tables: [pipeline.NAME.publisher.NAME]";
        for (name, value) in self.table(value, otherwise) {
            let places = Places { table: self.place(name.span()), ..Places::default() };
            let name = name.into_inner().into_owned();
            let mut publisher = PublisherTable { name, places, ..PublisherTable::default() };
            for (key, value) in self.table(value, otherwise) {
                self.note(&mut publisher.places, &key, &value);
                if key.get_ref() == "isolation" {
                    match value.get_ref().as_str() {
                        Some("shared") => publisher.isolation = Isolation::Shared,
                        Some("own-position") => publisher.isolation = Isolation::OwnPosition,
                        _ => self.problem(value.span(), "isolation is `shared` or `own-position`".to_owned()),
                    }
                } else if PIPELINE_ONLY.contains(&key.get_ref().as_ref()) {
                    let what = format!("`{}` is about the pipeline: it belongs under [pipeline.NAME]", key.get_ref());
                    self.problem(key.span(), what);
                } else if let Some(layer) = self.option::<PipelineOptions>((key, value), &["isolation"]) {
                    publisher.options = layer.over(publisher.options);
                }
            }
            publishers.push(publisher);
        }
        publishers
    }

    fn confirm(&mut self, value: Spanned<DeValue<'a>>) -> ConfirmOptions {
        let mut confirm = ConfirmOptions::default();
        for entry in self.table(value, "what is said of confirming is a table: [pipeline.NAME.confirm]") {
            if let Some(layer) = self.option::<ConfirmOptions>(entry, &["topic"]) {
                confirm = layer.over(confirm);
            }
        }
        confirm
    }

    fn table(&mut self, value: Spanned<DeValue<'a>>, otherwise: &str) -> Vec<Entry<'a>> {
        let span = value.span();
        match value.into_inner() {
            DeValue::Table(table) => in_order(table),
            _ => {
                self.problem(span, otherwise.to_owned());
                Vec::new()
            }
        }
    }

    /// Reads one key as a layer that says nothing else.
    fn option<O: Args + DeserializeOwned>(&mut self, (key, value): Entry<'a>, more_keys: &[&str]) -> Option<O> {
        let span = key.span();
        let name = options::renamed::<O>(key.get_ref()).unwrap_or_else(|| key.get_ref().to_string());
        let key = Spanned::new(span, Cow::Owned(name.clone()));
        let known = options::keys::<O>();
        let known = || known.iter().map(String::as_str).chain(more_keys.iter().copied());
        if known().all(|known| known != name) {
            let hint = nearest(&name, known()).map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
            self.problem(key.span(), format!("unknown key `{name}`{hint}"));
            return None;
        }
        let span = value.span();
        let only = DeTable::from_iter([(key, value)]);
        match O::deserialize(Deserializer::from(Spanned::new(span.clone(), only))) {
            Ok(layer) => Some(layer),
            Err(error) => {
                self.problem(error.span().unwrap_or(span), format!("{name}: {}", unquoted(error.message())));
                None
            }
        }
    }

    fn problem(&mut self, span: Range<usize>, what: String) {
        let place = self.place(span);
        self.problems.push(Problem::new(place, what));
    }

    /// The line and column where it begins.
    fn place(&self, span: Range<usize>) -> String {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        format!("{}:{line}:{column}", self.file)
    }

    /// Remembers where a value stands, and those within it.
    fn note(&self, places: &mut Places, key: &Spanned<Cow<'a, str>>, value: &Spanned<DeValue<'a>>) {
        self.note_within(places, key.get_ref(), value);
    }

    fn note_within(&self, places: &mut Places, path: &str, value: &Spanned<DeValue<'a>>) {
        if let DeValue::Table(table) = value.get_ref() {
            for (key, value) in table {
                self.note_within(places, &format!("{path}.{}", key.get_ref()), value);
            }
        }
        places.keys.insert(path.to_owned(), self.place(value.span()));
    }
}

/// A table's entries in the order of the file.
fn in_order<'a>(table: DeTable<'a>) -> Vec<Entry<'a>> {
    let mut entries: Vec<Entry<'a>> = table.into_iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    entries
}

/// A message without the text it found instead of what it expected, which may be a password.
fn unquoted(message: &str) -> String {
    let found = ["invalid type: string \"", "invalid value: string \"", "unknown variant `"];
    let quoting = found.iter().any(|kind| message.starts_with(kind));
    match message.rsplit_once(", expected ") {
        Some((_, "usize")) if quoting => "a whole number is expected, not a text".to_owned(),
        Some((_, expected)) if quoting => format!("{expected} is expected, not this text"),
        _ => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn problems(text: &str) -> Vec<String> {
        let error = parse("outboxd.toml", text).unwrap_err();
        error.problems.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_file_holds_the_process_and_its_pipelines_in_order() {
        let text = r#"
            admin = "off"
            fail-fast = true
            [pipeline.orders]
            source = "env:ORDERS_URL"
            table = ["public.outbox", "sales.outbox"]
            column = { key = "customer_id", "payload" = "body" }
            create-topics = 6
            max-in-flight-bytes = "8MiB"
            [pipeline.orders.kafka]
            linger.ms = 5
            "enable.idempotence" = true
            ssl.ca.location = "/ca.pem"
            [pipeline.accounts]
            table = "outbox"
            snapshot = "existing"
            create-topics = "3:2"
        "#;
        let file = parse("outboxd.toml", text).unwrap();
        assert_eq!((file.process.admin.as_deref(), file.process.fail_fast), (Some("off"), Some(true)));
        let [first, second] = &file.pipelines[..] else { panic!("{file:?}") };
        assert_eq!((first.name.as_str(), second.name.as_str()), ("orders", "accounts"));
        let (orders, accounts) = (&first.options, &second.options);
        assert_eq!(orders.source, Some("env:ORDERS_URL".into()));
        assert_eq!(orders.table, ["public.outbox", "sales.outbox"]);
        assert_eq!(orders.create_topics.as_deref(), Some("6"));
        assert_eq!(orders.max_in_flight_bytes, Some("8MiB".parse().unwrap()));
        let pairs = |list: &[super::super::Assignment]| {
            let mut pairs: Vec<_> = list.iter().map(|one| format!("{}={}", one.key, one.value)).collect();
            pairs.sort();
            pairs.join(" ")
        };
        assert_eq!(pairs(&orders.column), "key=customer_id payload=body");
        assert_eq!(pairs(&orders.kafka), "enable.idempotence=true linger.ms=5 ssl.ca.location=/ca.pem");
        assert_eq!(accounts.table, ["outbox"]);
        assert_eq!(accounts.snapshot, Some(super::super::Snapshot::Existing));
        assert_eq!(accounts.create_topics.as_deref(), Some("3:2"));
    }

    #[test]
    fn an_unknown_key_is_an_error_that_suggests_the_nearest() {
        assert_eq!(
            problems("admn = \"off\"\n[pipeline.a]\n  brokrs = \"b\"\n  zzz = 1"),
            [
                "outboxd.toml:1:1: unknown key `admn`; did you mean `admin`?",
                "outboxd.toml:3:3: unknown key `brokrs`; did you mean `brokers`?",
                "outboxd.toml:4:3: unknown key `zzz`",
            ]
        );
    }

    #[test]
    fn a_key_of_an_earlier_name_is_taken() {
        let text = "[pipeline.a]\namqp-exchange = \"shop\"\namqp-routing-key = \"old\"\nrouting-key = \"new\"";
        let options = parse("outboxd.toml", text).unwrap().pipelines.remove(0).options;
        assert_eq!((options.exchange.as_deref(), options.routing_key.as_deref()), (Some("shop"), Some("new")));
    }

    #[test]
    fn a_pipelines_key_at_the_top_is_told_where_it_belongs() {
        assert_eq!(
            problems("slot = \"a\""),
            ["outboxd.toml:1:1: `slot` is about a pipeline: it belongs under [pipeline.NAME]"]
        );
    }

    #[test]
    fn every_mistake_is_found_at_once_with_its_line_and_column() {
        let found = problems("[pipeline.a]\nmax-in-flight = \"many\"\nshutdown-timeout = \"20\"\nno-create = 1\n");
        assert_eq!(found.len(), 3, "{found:#?}");
        assert!(found[0].starts_with("outboxd.toml:2:17: max-in-flight: a whole number is expected"), "{found:?}");
        assert!(found[1].starts_with("outboxd.toml:3:20: shutdown-timeout: a duration is"), "{found:?}");
        assert!(found[2].starts_with("outboxd.toml:4:13: no-create: invalid type"), "{found:?}");
    }

    #[test]
    fn a_message_never_quotes_the_file() {
        for text in [
            "[pipeline.a]\nkafka = \"sasl.password=hunter2\"",
            "[pipeline.a]\nkafka.sasl.password = hunter2",
            "[pipeline.a]\nsource = \"postgres://a:hunter2@b\" x",
            "[pipeline.a]\nmax-in-flight = \"hunter2\"",
            "[pipeline.a]\nsnapshot = \"hunter2\"",
            "[pipeline.a]\nstall-timeout = \"hunter2\"",
            "admin-token = 'hunter2",
            "pipeline = \"hunter2\"",
        ] {
            let found = problems(text).join("\n");
            assert!(!found.contains("hunter2"), "{found}");
        }
    }

    #[test]
    fn a_pipeline_may_have_publishers() {
        let text = r#"
            [pipeline.shop]
            topic = "events"
            [pipeline.shop.publisher.audit]
            isolation = "own-position"
            table = "audit"
            [pipeline.shop.publisher.partners]
            sink = "http://partners"
            required-tags = ["public", "region=eu"]
        "#;
        let file = parse("outboxd.toml", text).unwrap();
        let [audit, partners] = &file.pipelines[0].publishers[..] else { panic!("{file:?}") };
        assert_eq!((audit.name.as_str(), audit.isolation), ("audit", Isolation::OwnPosition));
        assert_eq!((partners.name.as_str(), partners.isolation), ("partners", Isolation::Shared));
        assert_eq!(partners.options.required_tags, ["public", "region=eu"]);
        assert_eq!(
            problems("[pipeline.a.publisher.b]\nisolation = \"none\"\nlayout = \"native\"\nsnik = \"stdout\""),
            [
                "outboxd.toml:2:13: isolation is `shared` or `own-position`",
                "outboxd.toml:3:1: `layout` is about the pipeline: it belongs under [pipeline.NAME]",
                "outboxd.toml:4:1: unknown key `snik`; did you mean `sink`?",
            ]
        );
    }

    #[test]
    fn a_pipeline_may_say_how_its_receipts_are_confirmed() {
        let text = r#"
            [pipeline.shop]
            topic = "events"
            [pipeline.shop.confirm]
            topic = ["events", "events.retried"]
            batch = 500
            interval = "50ms"
        "#;
        let confirm = &parse("outboxd.toml", text).unwrap().pipelines[0].options.confirm;
        assert_eq!((confirm.batch, &confirm.group), (Some(500), &None));
        assert_eq!(confirm.topic, ["events", "events.retried"]);
        assert_eq!(
            problems("[pipeline.a.confirm]\nbach = 1\ninterval = 5\n[pipeline.b]\nconfirm = true"),
            [
                "outboxd.toml:2:1: unknown key `bach`; did you mean `batch`?",
                "outboxd.toml:3:12: interval: invalid type: integer `5`, expected a string",
                "outboxd.toml:5:11: what is said of confirming is a table: [pipeline.NAME.confirm]",
            ]
        );
    }

    #[test]
    fn a_file_without_a_pipeline_is_an_error() {
        assert_eq!(problems(""), ["outboxd.toml:1:1: there is no [pipeline.NAME] table"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC*", key in "[a-z-]{1,12}", value in "[\\[\\]{}\"'a-z0-9.=\n]{0,12}") {
            let _ = parse("f", &text);
            let _ = parse("f", &format!("[pipeline.x]\n{key} = {value}"));
        }
    }
}
