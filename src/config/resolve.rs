//! From layers of options to settings: who wins, what is derived from what, and whether it makes sense.
//!
//! Flag over environment over file over default. A flag or variable of the pipeline speaks of the one pipeline there
//! is. When the file holds several, a pipeline's flag is a usage error, since it cannot mean one of them, and a
//! pipeline's environment variable fills in what each table leaves out: the table, which names its pipeline, wins.

use std::sync::Arc;

use super::file::{self, FileOptions, PipelineTable, PublisherTable};
use super::kafka_options::{self, Guard, OptionValue};
use super::options::{ExtendedJson, LAYOUTS, OnLostPosition, PipelineOptions, ProcessOptions, Snapshot};
use super::places::{self, Places};
use super::problem::{ConfigError, Problem, nearest};
use super::resolve_publisher::Layer;
use super::resolve_retention;
use super::resolve_source::SourceOptions;
use super::secret::Secret;
use super::settings::{
    Admin, Brokers, Capture, Delivery, KafkaSettings, PipelineSettings, ProcessSettings, RouteSettings, Settings,
    SourceSettings, TopicCreation, WindowSettings,
};
use super::values::{Assignment, ByteSize, Span};
use crate::route::layout::{Layout, Role};

/// What was said on the command line and in the environment.
#[derive(Clone, Debug, Default)]
pub struct Said {
    pub pipeline: PipelineOptions,
    pub process: ProcessOptions,
    /// The pipeline's flags that stood on the command line, for messages.
    pub pipeline_flags: Vec<String>,
    /// Those whose variables were set in the environment, for messages.
    pub pipeline_variables: Vec<String>,
    /// No record will be sent: brokers may be missing.
    pub without_sink: bool,
}

impl Settings {
    /// Reads the config file, if one was named, and resolves all layers.
    pub fn load(said: Said) -> Result<Settings, ConfigError> {
        let file = said.process.config.as_deref().map(file::read).transpose()?;
        Settings::resolve(said, file)
    }

    /// Resolves all layers; reports every problem.
    pub fn resolve(said: Said, file: Option<FileOptions>) -> Result<Settings, ConfigError> {
        let mut problems = Vec::new();
        let mut several = false;
        let (process_file, process_places, layers) = match file {
            None => {
                let (places, publishers) = (Places::default(), Vec::new());
                let layer = Layer { table: None, places, options: said.pipeline, publishers };
                (ProcessOptions::default(), Places::default(), vec![layer])
            }
            Some(FileOptions { process, places, pipelines }) => {
                several = pipelines.len() > 1;
                if several && !said.pipeline_flags.is_empty() {
                    let what = "with several pipelines in the file a flag cannot mean one of them: set it in the file";
                    problems.push(Problem::new(said.pipeline_flags.join(", "), what));
                }
                // What is about the whole pipeline has one meaning, however many publishers it has.
                let ambiguous = |flag: &&String| !file::is_of_pipeline(flag.trim_start_matches("--"));
                let flags: Vec<_> = said.pipeline_flags.iter().filter(ambiguous).cloned().collect();
                if !several && !flags.is_empty() && pipelines.iter().any(|pipeline| !pipeline.publishers.is_empty()) {
                    let what = "with publishers in the file a flag cannot mean one of them: set it in the file";
                    problems.push(Problem::new(flags.join(", "), what));
                }
                let layered = pipelines.into_iter().map(|PipelineTable { name, places, options, publishers }| {
                    let said = said.pipeline.clone();
                    let options = if several { options.over(said) } else { said.over(options) };
                    Layer { table: Some(name), places, options, publishers }
                });
                (process, places, layered.collect())
            }
        };
        let origins = Arc::new(places::Said {
            flags: said.pipeline_flags,
            variables: said.pipeline_variables,
            fills_in: several,
        });
        // What was said beside the file has the last word, and is not where the file has it.
        let mut process_places = process_places;
        for (key, said) in
            [("admin", said.process.admin.is_some()), ("admin-token", said.process.admin_token.is_some())]
        {
            process_places.keys.retain(|there, _| !(said && there == key));
        }
        let process = process_settings(said.process.over(process_file), &process_places, &mut problems);
        let (mut pipelines, mut named) = (Vec::new(), Vec::new());
        for mut layer in layers {
            layer.options = layer.options.over(PipelineOptions::defaults());
            let place = layer.places.of("name").unwrap_or(&layer.places.table).to_owned();
            pipelines.extend(layer.pipelines(&origins, said.without_sink, &mut problems));
            named.resize(pipelines.len(), place);
        }
        problems.extend(clashes(&pipelines, &named));
        problems.extend(resolve_retention::refusals(&pipelines));
        match process {
            Some(process) if problems.is_empty() => Ok(Settings { process, pipelines }),
            _ => Err(ConfigError { problems }),
        }
    }
}

fn process_settings(said: ProcessOptions, places: &Places, problems: &mut Vec<Problem>) -> Option<ProcessSettings> {
    let place = |key: &str| places.of(key).map_or_else(|| format!("--{key}"), |place| format!("{place}: {key}"));
    let chosen = said.admin.is_some();
    let options = said.over(ProcessOptions::defaults());
    let mut found = Vec::new();
    let admin = match options.admin.map(|address| Secret::from(address).reveal()).transpose() {
        Ok(Some(address)) if address != "off" => match address.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Admin::Listen { address, chosen },
            _ => {
                found.push(Problem::new(place("admin"), format!("`{address}` is neither HOST:PORT nor `off`")));
                Admin::Off
            }
        },
        Ok(_) => Admin::Off,
        Err(error) => {
            found.push(Problem::new(place("admin"), error.to_string()));
            Admin::Off
        }
    };
    if let Some(Err(error)) = options.admin_token.as_ref().map(Secret::reveal) {
        found.push(Problem::new(place("admin-token"), error.to_string()));
    }
    let usable = found.is_empty();
    problems.append(&mut found);
    usable.then(|| ProcessSettings {
        admin,
        admin_token: options.admin_token,
        log_format: options.log_format,
        fail_fast: options.fail_fast.unwrap_or(false),
    })
}

/// What documents call a table's columns: their id is `_id`, and one layout is in camel case there.
pub(super) fn documents_names(route: &mut RouteSettings) {
    let Some(layout) = Layout::named(&route.layout) else { return };
    let own = [
        (Role::Id, "id", "id", "_id"),
        (Role::Key, "key", "message_group", "messageGroup"),
        (Role::Timestamp, "timestamp", "created_at", "createdAt"),
    ];
    for (role, name, column, field) in own {
        let chosen = route.columns.iter().any(|(chosen, _)| chosen == name);
        let camel = layout.name == "message-group" || role == Role::Id;
        if !chosen && camel && layout.column(role).is_some_and(|(of, _)| of == column) {
            route.columns.push((name.to_owned(), field.to_owned()));
        }
    }
}

/// Pipelines that would be taken for each other; each is named at a place of the file, or nowhere.
fn clashes(pipelines: &[PipelineSettings], named: &[String]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (at, pipeline) in pipelines.iter().enumerate() {
        let place = match named.get(at).map(String::as_str) {
            None | Some("") => format!("pipeline {}", pipeline.name),
            Some(place) => format!("{place}: pipeline {}", pipeline.name),
        };
        for earlier in &pipelines[..at] {
            if pipeline.name == earlier.name {
                let what = "two pipelines have this name: give one another `name`";
                problems.push(Problem::new(&place, what));
                continue;
            }
            if !matches!((&pipeline.capture, &earlier.capture), (Capture::Log, Capture::Log)) {
                continue;
            }
            if let Some(table) = pipeline.marked_like(earlier) {
                let what = format!("marks the rows of {table} as {} does: a row can say it of one only", earlier.name);
                problems.push(Problem::new(format!("pipeline {}", pipeline.name), what));
            }
            let (SourceSettings::Postgres(one), SourceSettings::Postgres(other)) = (&pipeline.source, &earlier.source)
            else {
                continue;
            };
            if one.url == other.url && one.slot == other.slot {
                let what = format!("reads the slot {} as {} does: give each its own `slot`", one.slot, earlier.name);
                problems.push(Problem::new(&place, what));
            }
        }
    }
    problems
}

/// The options that are about Kafka.
pub(super) struct KafkaOptions {
    pub brokers: Option<String>,
    pub given: Vec<Assignment>,
    pub off: Option<bool>,
    pub create_topics: Option<String>,
}

/// Resolves one pipeline, collecting its problems.
pub(super) struct Resolver {
    /// The pipeline's table in the file, if it has one.
    pub(super) table: Option<String>,
    /// The publisher whose table is looked at.
    pub(super) publisher: Option<String>,
    /// Where in the file the pipeline's keys stand, and the publisher's.
    places: Places,
    pub(super) publisher_places: Places,
    said: Arc<places::Said>,
    pub(super) without_sink: bool,
    pub(super) problems: Vec<Problem>,
}

impl Resolver {
    pub(super) fn new(table: Option<String>, places: Places, said: &Arc<places::Said>, without_sink: bool) -> Self {
        let (publisher, publisher_places, problems) = (None, Places::default(), Vec::new());
        Resolver { table, publisher, places, publisher_places, said: said.clone(), without_sink, problems }
    }

    /// Keeps a problem; what several publishers take from the pipeline is told once.
    pub(super) fn problem(&mut self, key: &str, what: impl Into<String>) {
        self.problem_within(key, "", what);
    }

    /// A problem of one entry of a key that is a table.
    pub(super) fn problem_within(&mut self, key: &str, entry: &str, what: impl Into<String>) {
        let problem = Problem::new(self.place(key, entry), what);
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    fn place(&self, key: &str, entry: &str) -> String {
        let at = |places: &Places| {
            let entry = places.of(&format!("{key}.{entry}")).filter(|_| !entry.is_empty());
            entry.or_else(|| places.of(key)).map(str::to_owned)
        };
        let own = at(&self.publisher_places);
        let in_file = own.or_else(|| at(&self.places));
        if let Some(said) = self.said.of(key, in_file.is_some()) {
            return said;
        }
        let whose = match (&self.table, &self.publisher, key) {
            (Some(table), Some(publisher), _) => format!("pipeline {table}, publisher {publisher}: {key}"),
            (Some(table), None, _) => format!("pipeline {table}: {key}"),
            (None, _, "source") => "SOURCE".to_owned(),
            (None, ..) => format!("--{key}"),
        };
        // What nobody said is missing from the table.
        let header = if self.publisher.is_some() { &self.publisher_places.table } else { &self.places.table };
        match in_file.as_deref().unwrap_or(header) {
            "" => whose,
            place => format!("{place}: {whose}"),
        }
    }

    /// Whether the key was said at all, in the file or beside it.
    pub(super) fn says(&self, key: &str) -> bool {
        let in_file = self.publisher_places.of(key).is_some() || self.places.of(key).is_some();
        in_file || self.said.of(key, false).is_some()
    }

    /// A free text's value, following a reference. Empty means nothing was said.
    pub(super) fn text(&mut self, key: &str, said: Option<String>) -> Option<String> {
        match Secret::from(said?).reveal() {
            Ok(text) => Some(text).filter(|text| !text.is_empty()),
            Err(error) => {
                self.problem(key, error.to_string());
                None
            }
        }
    }

    pub(super) fn pipeline(
        &mut self,
        said: PipelineOptions,
        publishers: Vec<PublisherTable>,
    ) -> Option<PipelineSettings> {
        let mut route = self.route(&said);
        let checkpoint_interval = self.duration("checkpoint-interval", said.checkpoint_interval);
        let stall_timeout = self.duration("stall-timeout", said.stall_timeout);
        let retention = self.retention(&said);
        let name = self.text("name", said.name.clone());
        let exactly_once = said.delivery.as_deref() == Some("exactly-once");
        let source = self.source(
            said.source.clone(),
            SourceOptions {
                slot: said.slot.clone(),
                publication: said.publication.clone(),
                no_create: said.no_create.unwrap_or(false),
                message_prefixes: said.message_prefix.clone(),
                snapshot: said.snapshot.unwrap_or(Snapshot::None),
                start: said.start.clone(),
                tables: said.table.clone(),
                layout: &route.layout,
                server_id: said.server_id,
                uuid_columns: said.uuid_column.clone(),
                extended_json: said.extended_json.unwrap_or(ExtendedJson::Relaxed),
                checkpoint: said.checkpoint.clone(),
            },
        );
        let (source, own_name) = source.unzip();
        if let (Some(source), Some(layout)) = (&source, Layout::named(&route.layout))
            && !layout.databases.contains(&source.kind())
        {
            let names = layout.databases.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ");
            self.problem("layout", format!("`{}` is a layout of {names}", layout.name));
        }
        let capture = self.capture(&said, source.as_ref());
        if matches!(capture, Some(Capture::Poll(_))) && publishers.len() > 1 {
            let what = "a row's status tells of one publisher only: give it one, or use `capture = \"log\"`";
            self.problem("capture", what);
        }
        let status = self.status(&said, source.as_ref(), capture.as_ref());
        let name = name.or_else(|| self.table.clone()).or(own_name).unwrap_or_default();
        let named = !publishers.is_empty();
        let publishers = self.publishers(&said, publishers, source.as_ref(), &name);
        let kafka = match publishers.first() {
            Some(lone) if !named => lone.as_ref().map(|publisher| publisher.kafka.clone()),
            _ => {
                let needed = (said.checkpoint.as_deref() == Some("kafka")).then_some("the checkpoint");
                let window = self.window(said.max_in_flight, said.max_in_flight_bytes);
                let options = KafkaOptions {
                    brokers: said.brokers,
                    given: said.kafka,
                    off: said.unsafe_settings,
                    create_topics: said.create_topics,
                };
                self.kafka(options, needed, &window)
            }
        };
        let source = source?;
        let capture = capture?;
        if exactly_once {
            self.exactly_once(said.snapshot, &source, &capture, publishers.len());
        }
        if let SourceSettings::Mongo(_) = source {
            documents_names(&mut route);
        }
        route.tables = source.tables().to_vec();
        Some(PipelineSettings {
            name,
            source,
            capture,
            route,
            kafka: kafka?,
            publishers: publishers.into_iter().collect::<Option<_>>()?,
            status,
            mark: said.mark.unwrap_or(false),
            on_lost_position: said.on_lost_position.unwrap_or(OnLostPosition::Exit),
            checkpoint_interval,
            retention,
            until_caught_up: said.until_caught_up.unwrap_or(false),
            no_standby: said.no_standby.unwrap_or(false),
            shutdown_timeout: said.shutdown_timeout.map_or_else(Default::default, |span| span.0),
            stall_timeout,
            confirm: said.confirm,
        })
    }

    pub(super) fn delivery(&mut self, said: Option<String>) -> Delivery {
        match said.as_deref() {
            None | Some("at-least-once") => Delivery::AtLeastOnce,
            Some("exactly-once") => Delivery::ExactlyOnce,
            Some(other) => {
                let what = format!("`{other}` is not a promise; there are `at-least-once` and `exactly-once`");
                self.problem("delivery", what);
                Delivery::AtLeastOnce
            }
        }
    }

    /// What exactly-once cannot be promised of.
    fn exactly_once(
        &mut self,
        snapshot: Option<Snapshot>,
        source: &SourceSettings,
        capture: &Capture,
        publishers: usize,
    ) {
        if matches!(capture, Capture::Poll(_)) {
            let what = "exactly-once needs a log or an event store to go back in: a row's status and Kafka's transaction \
                        cannot be committed as one; poll with at-least-once, or read the log";
            self.problem("delivery", what);
        }
        if snapshot == Some(Snapshot::Existing) {
            let what = "exactly-once cannot be promised of `--snapshot existing`, which begins anew after a crash: deliver \
                        what is there with at-least-once first";
            self.problem("delivery", what);
        }
        if publishers > 1 && matches!(source, SourceSettings::Mongo(_)) {
            let what = "exactly-once from MongoDB takes a stream for each publisher: give them \
                        `isolation = \"own-position\"`";
            self.problem("delivery", what);
        }
    }

    pub(super) fn layout(&mut self, said: Option<String>) -> String {
        let layout = self.text("layout", said).unwrap_or_default();
        if !LAYOUTS.contains(&layout.as_str()) {
            let hint = nearest(&layout, LAYOUTS).map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
            self.problem("layout", format!("`{layout}` is not a layout; there are {}{hint}", LAYOUTS.join(", ")));
        }
        layout
    }

    pub(super) fn window(&mut self, events: Option<usize>, bytes: Option<ByteSize>) -> WindowSettings {
        let window =
            WindowSettings { max_events: events.unwrap_or(0), max_bytes: bytes.map_or(0, |ByteSize(bytes)| bytes) };
        if window.max_events == 0 {
            self.problem("max-in-flight", "at least one event must be allowed in flight");
        }
        if window.max_bytes == 0 {
            self.problem("max-in-flight-bytes", "at least one byte must be allowed in flight");
        }
        window
    }

    pub(super) fn duration(&mut self, key: &str, said: Option<Span>) -> std::time::Duration {
        let duration = said.map_or_else(Default::default, |Span(duration)| duration);
        if duration.is_zero() {
            self.problem(key, "must be longer than nothing");
        }
        duration
    }

    pub(super) fn kafka(
        &mut self,
        options: KafkaOptions,
        needed: Option<&str>,
        window: &WindowSettings,
    ) -> Option<KafkaSettings> {
        let KafkaOptions { brokers, given, off, create_topics } = options;
        let guard = Guard { window, off: off.unwrap_or(false) };
        let (mut options, problems) = kafka_options::translate(&given, &guard);
        for (key, what) in problems {
            let given = given.iter().find(|one| one.key == key || kafka_options::canonical(&one.key) == key);
            let entry = given.map_or(String::new(), |one| one.key.clone());
            self.problem_within("kafka", &entry, if key.is_empty() { what } else { format!("{key}: {what}") });
        }
        let also = options.extract_if(.., |option| option.key == "bootstrap.servers").next();
        let also = also.and_then(|option| match option.value {
            OptionValue::Plain(servers) => Some(servers),
            OptionValue::Secret(_) | OptionValue::JaasPassword(_) => None,
        });
        let create_topics = self.create_topics(create_topics);
        let servers = match (self.text("brokers", brokers), also) {
            (Some(brokers), Some(also)) if brokers != also => {
                self.problem("kafka", "bootstrap.servers says otherwise than brokers: leave it out");
                return None;
            }
            (None, None) if self.without_sink => "embedded".to_owned(),
            (None, None) => match needed {
                None => return Some(KafkaSettings { brokers: Brokers::None, options, create_topics }),
                Some(whose) => {
                    let what =
                        format!("is missing: Kafka's bootstrap servers for {whose}, for instance localhost:9092");
                    self.problem("brokers", what);
                    return None;
                }
            },
            (Some(brokers), _) | (None, Some(brokers)) => brokers,
        };
        if servers == "embedded" {
            return Some(KafkaSettings { brokers: Brokers::Embedded, options, create_topics });
        }
        for server in servers.split(',').map(str::trim) {
            // Only a lone number after the last colon is a port: an IPv6 address has colons of its own.
            let bad_port = match server.rsplit_once(':') {
                Some((host, port)) => host.is_empty() || (!host.contains(':') && port.parse::<u16>().is_err()),
                None => false,
            };
            if server.is_empty() || bad_port {
                self.problem("brokers", format!("`{server}` is not a server; it looks like host:9092"));
            }
        }
        Some(KafkaSettings { brokers: Brokers::Servers(servers), options, create_topics })
    }

    fn create_topics(&mut self, said: Option<String>) -> Option<TopicCreation> {
        match self.text("create-topics", said)?.as_str() {
            "true" => Some(TopicCreation::default()),
            "false" | "off" => None,
            numbers => match numbers.parse() {
                Ok(creation) => Some(creation),
                Err(what) => {
                    self.problem("create-topics", what);
                    None
                }
            },
        }
    }
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
mod tests;
