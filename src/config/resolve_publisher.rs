//! What was said of publishers: each takes from the pipeline's options what its own table leaves out.

use std::sync::Arc;

use super::file::PublisherTable;
use super::options::{Isolation, PipelineOptions};
use super::places::{Places, Said};
use super::problem::{Problem, nearest};
use super::resolve::{KafkaOptions, Resolver, documents_names};
use super::resolve_sink::{HttpOptions, RabbitOptions, SinkOptions};
use super::settings::{
    Brokers, CheckpointPlace, DeadLetter, Delivery, KafkaSettings, PipelineSettings, PublisherSettings, RouteSettings,
    SelectionSettings, SinkSettings, SourceSettings, TableName,
};
use super::values::{Assignment, ByteSize};
use crate::event::Projection;
use crate::route::layout::Role;
use crate::route::selection::Selection;
use crate::route::{Plan, PlanError};

/// A pipeline's options with its defaults, and its publishers' tables.
pub(super) struct Layer {
    pub table: Option<String>,
    /// Where in the file its keys stand.
    pub places: Places,
    pub options: PipelineOptions,
    pub publishers: Vec<PublisherTable>,
}

impl Layer {
    /// The pipelines that it means: one for all publishers that share a reading of the log, one for each that does not.
    pub(super) fn pipelines(
        self,
        said: &Arc<Said>,
        without_sink: bool,
        problems: &mut Vec<Problem>,
    ) -> Vec<PipelineSettings> {
        let Layer { table, places, options, publishers } = self;
        let lone = publishers.is_empty();
        let (shared, own): (Vec<_>, Vec<_>) =
            publishers.into_iter().partition(|publisher| publisher.isolation == Isolation::Shared);
        let mut pipelines = Vec::new();
        if lone || !shared.is_empty() {
            let mut resolver = Resolver::new(table.clone(), places.clone(), said, without_sink);
            pipelines.extend(resolver.pipeline(options.clone(), shared));
            problems.append(&mut resolver.problems);
        }
        for publisher in own {
            let mut resolver = Resolver::new(table.clone(), places.clone(), said, without_sink);
            pipelines.extend(resolver.own_pipeline(options.clone(), publisher));
            problems.append(&mut resolver.problems);
        }
        pipelines
    }
}

impl Resolver {
    /// A publisher with a position of its own: a pipeline that is called after both.
    fn own_pipeline(&mut self, mut said: PipelineOptions, publisher: PublisherTable) -> Option<PipelineSettings> {
        let suffix = publisher.name.clone();
        let slot = publisher.options.slot.is_some();
        if said.server_id.is_some() {
            self.problem("server-id", "cannot be the same for several readers: leave it out");
        }
        if said.mark == Some(true) {
            self.problem(
                "mark",
                "a row says for all publishers that it was delivered: none can have a position of its own",
            );
        }
        let mut publisher = publisher;
        said.slot = publisher.options.slot.take().or(said.slot);
        said.start = publisher.options.start.take().or(said.start);
        said.snapshot = publisher.options.snapshot.take().or(said.snapshot);
        let mut pipeline = self.pipeline(said, vec![publisher])?;
        pipeline.name = format!("{}-{suffix}", pipeline.name);
        for publisher in &mut pipeline.publishers {
            publisher.name.clone_from(&pipeline.name);
        }
        let part: String =
            suffix.to_ascii_lowercase().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        match &mut pipeline.source {
            SourceSettings::Postgres(source) => {
                if !slot {
                    source.slot = format!("{}_{part}", source.slot);
                }
                let slot = source.slot.clone();
                self.check_slot(&slot);
            }
            SourceSettings::MySql(source) => apart(&mut source.checkpoint, &part),
            SourceSettings::Mongo(source) => apart(&mut source.checkpoint, &part),
        }
        Some(pipeline)
    }

    /// The publishers of a pipeline; without tables of their own, the one that the pipeline itself is.
    pub(super) fn publishers(
        &mut self,
        said: &PipelineOptions,
        tables: Vec<PublisherTable>,
        source: Option<&SourceSettings>,
        name: &str,
    ) -> Vec<Option<PublisherSettings>> {
        if tables.is_empty() {
            let also = (said.checkpoint.as_deref() == Some("kafka")).then_some("the checkpoint");
            return vec![self.publisher(name.to_owned(), said.clone(), Vec::new(), source, also)];
        }
        let one = |table: PublisherTable| {
            let PublisherTable { name, places, mut options, .. } = table;
            (self.publisher, self.publisher_places) = (Some(name.clone()), places);
            for (key, set) in [
                ("slot", options.slot.is_some()),
                ("start", options.start.is_some()),
                ("snapshot", options.snapshot.is_some()),
            ] {
                if set {
                    self.problem(
                        key,
                        "is for a publisher with `isolation = \"own-position\"`; others share the pipeline's",
                    );
                }
            }
            let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
            if name.is_empty() || !name.bytes().all(legal) {
                self.problem("publisher", "a publisher's name has letters, digits, dots, dashes and underscores");
            }
            let picked = std::mem::take(&mut options.table);
            let publisher = self.publisher(name, options.over(said.clone()), picked, source, None);
            (self.publisher, self.publisher_places) = (None, Places::default());
            publisher
        };
        tables.into_iter().map(one).collect()
    }

    fn publisher(
        &mut self,
        name: String,
        said: PipelineOptions,
        picked: Vec<String>,
        source: Option<&SourceSettings>,
        also: Option<&'static str>,
    ) -> Option<PublisherSettings> {
        let window = self.window(said.max_in_flight, said.max_in_flight_bytes);
        let mut route = self.route(&said);
        let selection = SelectionSettings {
            required_tags: said.required_tags,
            any_of_tags: said.any_of_tags,
            types: said.only_type,
            versions: said.only_version,
            tables: self.tables(&picked),
        };
        let tag_name = |tag: &String| tag.split_once('=').map_or(tag.as_str(), |(name, _)| name).to_owned();
        route.key_tags = selection.required_tags.iter().chain(&selection.any_of_tags).map(tag_name).collect();
        route.publisher.clone_from(&name);
        let dead_letter = self.dead_letter(said.dead_letter, source);
        let sink = self.sink(
            SinkOptions {
                sink: said.sink,
                http: HttpOptions {
                    token: said.http_token,
                    headers: said.http_header,
                    sign: said.http_sign,
                    body: said.http_body,
                    batch: said.http_batch,
                    timeout: said.http_timeout,
                    path: said.http_path,
                    routes: said.http_route,
                    ca: said.http_ca,
                },
                rabbit: RabbitOptions {
                    exchange: said.exchange,
                    routing_key: said.routing_key,
                    declare: said.amqp_declare,
                    mandatory: said.amqp_mandatory,
                    batch: said.amqp_batch,
                    ca: said.amqp_ca,
                    certificate: said.amqp_cert,
                    key: said.amqp_key,
                },
                lanes: said.max_groups.or(said.lanes),
                retries: said.max_retries,
                backoff: said.retry_backoff,
            },
            &mut route,
        );
        let needed = match (&sink, &dead_letter) {
            (Some(SinkSettings::Kafka), _) => Some("the sink"),
            (_, DeadLetter::Topic(_)) => Some("the dead-letter topic"),
            _ => also,
        };
        let kafka = KafkaOptions {
            brokers: said.brokers,
            given: said.kafka,
            off: said.unsafe_settings,
            create_topics: said.create_topics,
        };
        let kafka = self.kafka(kafka, needed, &window);
        let delivery = self.delivery(said.delivery);
        if delivery == Delivery::ExactlyOnce && sink.as_ref().is_some_and(|sink| !matches!(sink, SinkSettings::Kafka)) {
            self.problem(
                "delivery",
                "exactly-once is for Kafka, which has transactions; other sinks get at-least-once",
            );
        }
        if let (Delivery::ExactlyOnce, Some(KafkaSettings { brokers: Brokers::Embedded, .. }), false) =
            (delivery, &kafka, self.without_sink)
        {
            self.problem("delivery", "exactly-once needs a real cluster: the embedded broker keeps no transactions");
        }
        let max_retained = said.max_retained.map(|ByteSize(bytes)| bytes as u64);
        let source = source?;
        if max_retained.is_some() && !matches!(source, SourceSettings::Postgres(_)) {
            self.problem(
                "max-retained",
                "is only for PostgreSQL: other databases recycle their logs by their own rules",
            );
        }
        if let Some(unknown) = selection.tables.iter().find(|table| !source.tables().contains(table)) {
            self.problem(
                "table",
                format!("`{unknown}` is not a table of the pipeline: add it to the pipeline's `table`"),
            );
        }
        if let SourceSettings::Mongo(_) = source {
            documents_names(&mut route);
        }
        route.tables = source.tables().to_vec();
        self.compiled(&route, &selection, sink.as_ref(), source);
        Some(PublisherSettings {
            name,
            selection,
            route,
            sink: sink?,
            kafka: kafka?,
            dead_letter,
            delivery,
            source: Arc::new(source.clone()),
            window,
            max_retained,
        })
    }

    /// Whether events can be routed so. What is wrong is told here, where it can be pointed at.
    fn compiled(
        &mut self,
        route: &RouteSettings,
        selection: &SelectionSettings,
        sink: Option<&SinkSettings>,
        source: &SourceSettings,
    ) {
        let mut projection = Projection::default();
        let plan = Plan::compile(route, &mut projection).map(|_| ());
        let selected = Selection::compile(selection, route, source.tables(), &mut projection).map(|_| ());
        for error in [plan.err(), selected.err()].into_iter().flatten() {
            let topic = match sink {
                Some(SinkSettings::Http(_)) => "http-path",
                Some(SinkSettings::RabbitMq(_)) if self.says("amqp-routing-key") => "amqp-routing-key",
                _ => "topic",
            };
            let what = error.to_string();
            match error {
                // It was told already.
                PlanError::UnknownLayout(_) => {}
                PlanError::UnknownRole(role) => {
                    let near = nearest(&role, Role::ALL.iter().map(|(name, _)| *name));
                    let hint = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
                    self.problem_within("column", &role, format!("{what}{hint}"));
                }
                PlanError::PayloadPointer => self.problem_within("column", "payload", what),
                PlanError::NoColumn(_, role) => {
                    let asked = match role {
                        "version" => "only-version",
                        "type" => "only-type",
                        "tags" if self.says("required-tags") => "required-tags",
                        "tags" => "any-of-tags",
                        _ => "column",
                    };
                    self.problem(if self.says(asked) { asked } else { "column" }, what);
                }
                PlanError::BadVersion(_) => self.problem("only-version", what),
                PlanError::Template(_) | PlanError::TopicName(_) => self.problem(topic, what),
            }
        }
    }

    fn dead_letter(&mut self, said: Option<String>, source: Option<&SourceSettings>) -> DeadLetter {
        let Some(place) = self.text("dead-letter", said).filter(|place| place != "none") else {
            return DeadLetter::None;
        };
        let documents = matches!(source, Some(SourceSettings::Mongo(_)));
        let problem = match place.split_once(':') {
            Some(("topic", topic)) if !topic.is_empty() => return DeadLetter::Topic(topic.to_owned()),
            Some(("collection", _)) if source.is_some() && !documents => {
                "a collection is for MongoDB; here it is table:NAME".to_owned()
            }
            Some(("table" | "collection", name)) => match name.parse::<TableName>() {
                Ok(table) => match source.and_then(|source| read_as_outbox(&table, source)) {
                    None => return DeadLetter::Table(table),
                    Some(why) => why.to_owned(),
                },
                Err(what) => format!("`{name}`: {what}"),
            },
            _ => format!("`{place}` is not a place; there are table:NAME, collection:NAME, topic:NAME and none"),
        };
        self.problem("dead-letter", problem);
        DeadLetter::None
    }

    /// How rows become records, as far as it does not depend on the sink.
    pub(super) fn route(&mut self, said: &PipelineOptions) -> RouteSettings {
        let pairs = |list: &[Assignment]| list.iter().map(|one| (one.key.clone(), one.value.clone())).collect();
        RouteSettings {
            layout: self.layout(said.layout.clone()),
            columns: pairs(&said.column),
            headers: pairs(&said.header),
            topic: self.text("topic", said.topic.clone()),
            tombstone_on_null: said.tombstone_on_null.unwrap_or(false),
            ..RouteSettings::default()
        }
    }
}

/// Why letters that are put there would be taken for events, if they would.
fn read_as_outbox(place: &TableName, source: &SourceSettings) -> Option<&'static str> {
    // A name without a schema may mean either.
    let same = |one: &Option<String>, other: &Option<String>| one.is_none() || other.is_none() || one == other;
    if source.tables().iter().any(|table| table.name == place.name && same(&table.schema, &place.schema)) {
        return Some("is the outbox itself: name another table");
    }
    let everything = |table: &TableName| table.name == "*" && table.schema == place.schema;
    let all = matches!(source, SourceSettings::Mongo(_)) && source.tables().iter().any(everything);
    all.then_some("would be read as an outbox by --table '*': name a collection of another database, as DATABASE.NAME")
}

/// A file holds one position.
fn apart(place: &mut CheckpointPlace, suffix: &str) {
    if let CheckpointPlace::File(path) = place {
        *path = format!("{path}.{suffix}");
    }
}
