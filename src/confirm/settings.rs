//! What a confirmer needs to know, made of a pipeline's settings: typed and checked, every problem at once.

use std::time::Duration;

use super::id::IdFrom;
use crate::config::{
    Brokers, ConfigError, ConfirmOptions, KafkaSettings, PipelineSettings, Problem, PublisherSettings, SinkSettings,
    SourceSettings, TableName,
};
use crate::event::Projection;
use crate::failure::Halt;
use crate::route::layout::{LAYOUTS, Layout, Role};
use crate::route::{Plan, PlanError, check_topic};

/// More than this in one statement holds its rows' locks for too long.
const LARGEST_BATCH: usize = 10_000;

#[derive(Clone, Debug)]
pub struct ConfirmSettings {
    /// The pipeline's.
    pub name: String,
    pub source: SourceSettings,
    pub table: TableName,
    /// The columns.
    pub id: String,
    pub received_at: String,
    pub kafka: KafkaSettings,
    pub group: String,
    pub topics: Vec<String>,
    /// Records whose receipts are written at once.
    pub batch: usize,
    /// How long the first of them waits.
    pub interval: Duration,
    pub id_from: IdFrom,
    pub until_caught_up: bool,
    pub shutdown_timeout: Duration,
    pub stall_timeout: Duration,
}

impl ConfirmSettings {
    /// A confirmer for each pipeline whose rows keep receipts; the others of a file are passed over.
    pub fn of_all(pipelines: &[PipelineSettings]) -> Result<Vec<Self>, Halt> {
        let several = pipelines.len() > 1;
        let kept: Vec<_> =
            pipelines.iter().filter(|pipeline| !several || column(pipeline, Role::ReceivedAt).is_some()).collect();
        if kept.is_empty() {
            let what = format!("no pipeline of the file keeps receipts: {}", whose_layout());
            return Err(ConfigError::from(Problem::new("--config", what)).into());
        }
        let (mut all, mut problems) = (Vec::new(), Vec::new());
        for pipeline in kept {
            match Self::of(pipeline) {
                Ok(settings) => all.push(settings),
                Err(error) => problems.extend(error.problems),
            }
        }
        if problems.is_empty() { Ok(all) } else { Err(ConfigError { problems }.into()) }
    }

    pub fn of(pipeline: &PipelineSettings) -> Result<Self, ConfigError> {
        let mut problems = Problems { pipeline: &pipeline.name, found: Vec::new() };
        let said = pipeline.confirm.clone().over(ConfirmOptions::defaults());
        if matches!(pipeline.source, SourceSettings::Mongo(_)) {
            problems.add("SOURCE", "receipts are confirmed in PostgreSQL, MySQL and MariaDB, not in MongoDB");
        }
        for (role, _) in pipeline.route.columns.iter().filter(|(role, _)| Role::named(role).is_none()) {
            problems.add("column", PlanError::UnknownRole(role.clone()).to_string());
        }
        let received_at = column(pipeline, Role::ReceivedAt);
        match &received_at {
            None => {
                problems.add("layout", format!("`{}` keeps no receipts: {}", pipeline.route.layout, whose_layout()));
            }
            Some(path) if path.starts_with('/') => problems.add("column", "received_at must be a column"),
            Some(_) => {}
        }
        let id = column(pipeline, Role::Id).filter(|id| !id.starts_with('/'));
        if id.is_none() {
            problems.add("column", "rows are found by their id, which must be a column: --column id=COLUMN");
        }
        let table = match pipeline.source.tables() {
            [table] => Some(table.clone()),
            tables => {
                let what = format!(
                    "a record does not say which of {} tables it came from: name one with --table, and a confirmer for each",
                    tables.len()
                );
                problems.add("table", what);
                None
            }
        };
        let id_from = said.id_from.unwrap_or_default().parse::<IdFrom>();
        if let Err(what) = &id_from {
            problems.add("id-from", what.clone());
        }
        let batch = said.batch.unwrap_or_default();
        if batch == 0 || batch > LARGEST_BATCH {
            problems.add("batch", format!("must be between 1 and {LARGEST_BATCH}"));
        }
        let interval = said.interval.map(|span| span.0).unwrap_or_default();
        if interval.is_zero() {
            problems.add("interval", "must be longer than nothing");
        }
        let group = said.group.filter(|group| !group.is_empty());
        let group = group.unwrap_or_else(|| format!("outboxd-confirm-{}", pipeline.name));
        let topics = problems.topics(&said.topic, pipeline);
        let kafka = problems.kafka(pipeline);
        for (key, what) in kafka.iter().flat_map(super::consumer::refusals) {
            problems.add("kafka", format!("{key}: {what}"));
        }
        match (received_at, id, table, id_from, kafka, problems.found) {
            (Some(received_at), Some(id), Some(table), Ok(id_from), Some(kafka), found) if found.is_empty() => {
                Ok(ConfirmSettings {
                    name: pipeline.name.clone(),
                    source: pipeline.source.clone(),
                    table,
                    id,
                    received_at,
                    kafka,
                    group,
                    topics,
                    batch,
                    interval,
                    id_from,
                    until_caught_up: pipeline.until_caught_up,
                    shutdown_timeout: pipeline.shutdown_timeout,
                    stall_timeout: pipeline.stall_timeout,
                })
            }
            (.., problems) => Err(ConfigError { problems }),
        }
    }
}

/// The column that plays a role: the user's choice, else the layout's.
fn column(pipeline: &PipelineSettings, role: Role) -> Option<String> {
    let chosen = pipeline.route.columns.iter().rev().find(|(name, _)| Role::named(name) == Some(role));
    let own = || Layout::named(&pipeline.route.layout)?.column(role).map(|(column, _)| column.to_owned());
    chosen.map(|(_, column)| column.clone()).or_else(own)
}

fn whose_layout() -> String {
    let keeping = LAYOUTS.iter().filter(|layout| layout.column(Role::ReceivedAt).is_some());
    let names: Vec<_> = keeping.map(|layout| format!("`{}`", layout.name)).collect();
    format!("there is --layout {}, or name a column of yours with --column received_at=COLUMN", names.join(", "))
}

struct Problems<'a> {
    pipeline: &'a str,
    found: Vec<Problem>,
}

impl Problems<'_> {
    fn add(&mut self, key: &str, what: impl Into<String>) {
        self.found.push(Problem::new(format!("pipeline {}: {key}", self.pipeline), what));
    }

    /// The topics that were named, else those that the pipeline delivers to.
    fn topics(&mut self, said: &[String], pipeline: &PipelineSettings) -> Vec<String> {
        let mut topics: Vec<String> = Vec::new();
        let named: Vec<_> =
            said.iter().flat_map(|topics| topics.split(',')).map(|topic| topic.trim().to_owned()).collect();
        let of_relay = || -> Result<Vec<String>, String> {
            let each = to_kafka(pipeline).map(topics_of);
            Ok(each.collect::<Result<Vec<_>, _>>()?.concat())
        };
        let found = if named.is_empty() { of_relay() } else { Ok(named) };
        for topic in found.unwrap_or_else(|what| {
            self.add("topic", what);
            Vec::new()
        }) {
            if check_topic(&topic).is_err() {
                self.add("topic", format!("`{topic}` is not a topic: name those that the records are in"));
            } else if !topics.contains(&topic) {
                topics.push(topic);
            }
        }
        if topics.is_empty() && self.found.is_empty() {
            self.add("topic", "the pipeline delivers nothing to Kafka: name the topics that the records are in");
        }
        topics
    }

    /// Where those topics are.
    fn kafka(&mut self, pipeline: &PipelineSettings) -> Option<KafkaSettings> {
        let mut clusters = to_kafka(pipeline).map(|publisher| &publisher.kafka);
        let kafka = clusters.next().unwrap_or(&pipeline.kafka);
        if clusters.any(|other| other.brokers != kafka.brokers || other.options != kafka.options) {
            let what = "its publishers are in several clusters, and receipts are of one: run it with flags instead";
            self.add("brokers", what);
        }
        match kafka.brokers {
            Brokers::Servers(_) => Some(kafka.clone()),
            Brokers::Embedded => {
                self.add("brokers", "an embedded broker is its own process's alone: name real ones");
                None
            }
            Brokers::None => {
                self.add("brokers", "is missing: Kafka's bootstrap servers, for instance localhost:9092");
                None
            }
        }
    }
}

fn to_kafka(pipeline: &PipelineSettings) -> impl Iterator<Item = &PublisherSettings> {
    pipeline.publishers.iter().filter(|publisher| matches!(publisher.sink, SinkSettings::Kafka))
}

/// Where a publisher's records are; a list, where one was said for the confirmer's sake.
fn topics_of(publisher: &PublisherSettings) -> Result<Vec<String>, String> {
    let templates: Vec<Option<String>> = match &publisher.route.topic {
        Some(said) => said.split(',').map(|template| Some(template.trim().to_owned())).collect(),
        None => vec![None],
    };
    let fixed = |topic: Option<String>| {
        let mut route = publisher.route.clone();
        route.topic = topic;
        let plan = Plan::compile(&route, &mut Projection::default()).map_err(|error| error.to_string())?;
        let varies = || "the relay's topic differs from row to row: name the topics that the records are in".to_owned();
        plan.fixed_topic().map(str::to_owned).ok_or_else(varies)
    };
    templates.into_iter().map(fixed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{PipelineOptions, Said, Settings, parse};

    fn pipelines(file: &str) -> Vec<PipelineSettings> {
        Settings::resolve(Said::default(), Some(parse("f", file).unwrap())).unwrap().pipelines
    }

    fn told(file: &str) -> String {
        ConfirmSettings::of_all(&pipelines(file)).unwrap_err().to_string()
    }

    const ZONES: &str = "[pipeline.zones]\nsource = 'postgres://h/db'\nbrokers = 'k:1'\nlayout = 'produce-receive'\n";

    #[test]
    fn a_pipeline_of_the_layout_says_all_that_is_needed() {
        let all = ConfirmSettings::of_all(&pipelines(ZONES)).unwrap();
        let [one] = &all[..] else { panic!("{all:?}") };
        assert_eq!((one.group.as_str(), one.batch, one.interval.as_millis()), ("outboxd-confirm-zones", 1000, 100));
        assert_eq!((one.topics.join(" ").as_str(), one.id.as_str()), ("outbox-events", "id"));
        assert_eq!((one.received_at.as_str(), one.table.to_string().as_str()), ("received_at", "outbox"));
        assert_eq!(one.id_from, IdFrom::Header("id".to_owned()));
    }

    #[test]
    fn topics_are_those_that_were_named_else_the_relays() {
        let topics = |more: &str| {
            let all = ConfirmSettings::of_all(&pipelines(&format!("{ZONES}{more}"))).unwrap();
            all[0].topics.join(" ")
        };
        assert_eq!(topics("topic = 'zone.events'"), "zone.events");
        assert_eq!(topics("topic = 'zone.events'\n[pipeline.zones.confirm]\ntopic = ['a', 'b', 'a']"), "a b");
        assert_eq!(
            topics("[pipeline.zones.publisher.x]\ntopic = 'c'\n[pipeline.zones.publisher.y]\nsink = 'stdout'"),
            "c"
        );
        assert!(told(&format!("{ZONES}topic = 'zone.{{code}}'")).contains("differs from row to row"));
        assert!(told(&format!("{ZONES}[pipeline.zones.confirm]\ntopic = 'a b'")).contains("`a b` is not a topic"));
    }

    #[test]
    fn every_problem_is_told_at_once() {
        let file = "[pipeline.a]\nsource = 'mongodb://h/db'\nbrokers = 'k:1'\nkafka = { \"enable.auto.commit\" = true }\n\
                    [pipeline.a.confirm]\nbatch = 0\nid-from = 'somewhere'";
        let found = told(file);
        for part in [
            "not in MongoDB",
            "`native` keeps no receipts: there is --layout `produce-receive`",
            "between 1 and 10000",
            "header:NAME",
            "enable.auto.commit: offsets are committed only after",
        ] {
            assert!(found.contains(part), "{part} is not in {found}");
        }
    }

    #[test]
    fn a_file_is_confirmed_as_far_as_it_keeps_receipts() {
        let other = "[pipeline.orders]\nsource = 'postgres://h/orders'\nbrokers = 'k:1'\n";
        let all = ConfirmSettings::of_all(&pipelines(&format!("{ZONES}{other}"))).unwrap();
        assert_eq!(all.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["zones"]);
        let third = other.replace("orders", "third");
        assert!(told(&format!("{other}{third}")).contains("no pipeline of the file keeps receipts"));
    }

    #[test]
    fn a_column_of_ones_own_makes_any_layout_keep_receipts() {
        let said = PipelineOptions {
            source: Some("mysql://h/db".into()),
            brokers: Some("k:1".to_owned()),
            topic: Some("orders".to_owned()),
            column: vec!["received_at=seen_at".parse().unwrap()],
            ..PipelineOptions::default()
        };
        let settings = Settings::resolve(Said { pipeline: said, ..Said::default() }, None).unwrap();
        let one = ConfirmSettings::of(&settings.pipelines[0]).unwrap();
        assert_eq!((one.received_at.as_str(), one.topics[0].as_str()), ("seen_at", "orders"));
    }

    #[test]
    fn several_tables_are_refused_for_their_ids_would_be_mixed_up() {
        assert!(told(&format!("{ZONES}table = ['a', 'b']")).contains("which of 2 tables"));
    }
}
