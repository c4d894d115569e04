//! docs/config.md, written from the definitions in `options.rs`.

use std::fmt::Write;

use clap::Arg;

use super::confirm_options::ConfirmOptions;
use super::options::{self, PipelineOptions, ProcessOptions};

const HEADINGS: [&str; 9] =
    ["Source", "Polling", "Routing", "Selection", "Kafka", "HTTP", "RabbitMQ", "Delivery", "Operation"];

const INTRODUCTION: &str = "\
# Configuration

<!-- Written by `cargo run -- config-reference > docs/config.md`: edit src/config/options.rs instead. -->

Each option is a flag, an environment variable and a key of the config file. A flag beats the environment, which beats
the file, which beats the default.

- A list given by a flag replaces the file's; `KEY=VALUE` options are laid over the file's key by key.
- In the environment the items of a list are separated by commas, the settings of `OUTBOXD_KAFKA` by line breaks. A
  variable that is set to nothing counts as not set.
- Durations are `500ms`, `20s`, `5m`, `2h`, `30d`; sizes are `65536`, `512KiB`, `64MiB`.
- Flags that are on or off may be written `--no-create` or `--no-create=false`.
- A free text may be kept elsewhere: `file:/path` or `env:NAME`. SOURCE, the admin token and Kafka's passwords are then
  read anew at every connect, so that rotation needs no restart.
";

const FILE: &str = r#"
## The config file

Keys of the process stand at the top; each pipeline has a table, whose name is the pipeline's. Unknown keys are errors.

```toml
admin = "0.0.0.0:7420"
admin-token = "file:/run/secrets/outboxd-admin"
log-format = "json"

[pipeline.orders]
source = "env:ORDERS_DATABASE_URL"
table = ["public.outbox"]
column = { key = "customer_id" }
brokers = "kafka-1:9093,kafka-2:9093"
topic = "orders.events"
create-topics = "6:3"
dead-letter = "topic:orders.dead"

[pipeline.orders.kafka]
security.protocol = "SASL_SSL"
sasl.mechanism = "SCRAM-SHA-512"
sasl.username = "outboxd"
sasl.password = "file:/run/secrets/kafka"

[pipeline.accounts]
source = "postgres://outboxd@accounts-db/accounts?sslmode=verify-full"
layout = "debezium"
brokers = "kafka-1:9092"
```

A pipeline may have several publishers, each with its own sink, selection, window, retries and dead-letter place. What a
publisher's table leaves out is as the pipeline's says; `table` picks some of the pipeline's tables.

```toml
[pipeline.shop]
source = "env:SHOP_DATABASE_URL"
table = ["outbox", "audit_outbox"]
column = { tags = "labels" }
brokers = "kafka-1:9092"
topic = "shop.events"

[pipeline.shop.publisher.kafka]

[pipeline.shop.publisher.partners]
sink = "https://partners.example.com/events"
http-token = "file:/run/secrets/partners"
required-tags = ["public"]
only-type = ["order.*", "invoice.*"]
dead-letter = "topic:shop.partners.dead"

[pipeline.shop.publisher.archive]
isolation = "own-position"
table = "audit_outbox"
topic = "shop.audit"
```

`isolation = "shared"`, the default, reads the log once for all; the source is confirmed where the slowest stands, and a
slow one holds the others back when its window is full. `own-position` is short for a pipeline of its own, with a slot
or checkpoint of its own (`shop-archive`, slot `…_archive`), independent of all others.

With one pipeline in the file, flags and variables of the pipeline override its table. With several, a flag of the
pipeline is a usage error, since it cannot mean one of them, and a variable fills in what each table leaves out.
"#;

const CONFIRM: &str = r#"
## Confirmation

Of `outboxd confirm` alone; it takes the flags of source, routing and Kafka as `run` does, and --topic as often as there are
topics. In the file they are a table of the pipeline, which may also name the topics where they are others than the relay's:

```toml
[pipeline.zones.confirm]
batch = 500
topic = ["outbox-events", "outbox-events.replayed"]
```
"#;

/// The text of docs/config.md.
pub fn markdown() -> String {
    let mut page = INTRODUCTION.to_owned();
    let pipeline = options::definitions::<PipelineOptions>();
    for heading in HEADINGS {
        table(&mut page, heading, &pipeline);
    }
    page.push_str(CONFIRM);
    rows(&mut page, &options::definitions::<ConfirmOptions>());
    page.push_str("\n## Of the process\n\nAt the top of the config file.\n");
    rows(&mut page, &options::definitions::<ProcessOptions>());
    page.push_str(FILE);
    page
}

fn table(page: &mut String, heading: &str, definitions: &[Arg]) {
    // SOURCE has no heading: in the help, arguments stand before all flags.
    let under = definitions.iter().filter(|arg| arg.get_help_heading().unwrap_or("Source") == heading).cloned();
    let _ = write!(page, "\n## {heading}\n");
    rows(page, &under.collect::<Vec<_>>());
}

fn rows(page: &mut String, definitions: &[Arg]) {
    page.push_str("\n| flag | environment | key | meaning | default |\n|---|---|---|---|---|\n");
    for arg in definitions {
        let environment = arg.get_env().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let key = if in_file(arg) { format!("`{}`", options::key(arg)) } else { "–".to_owned() };
        let (meaning, default) = meaning(arg);
        let _ = writeln!(page, "| `{}` | `{environment}` | {key} | {meaning} | {default} |", flag(arg));
    }
}

fn in_file(arg: &Arg) -> bool {
    let keys = options::keys::<PipelineOptions>().into_iter().chain(options::keys::<ProcessOptions>());
    keys.chain(options::keys::<ConfirmOptions>()).any(|key| key == options::key(arg))
}

fn is_switch(arg: &Arg) -> bool {
    arg.is_require_equals_set()
}

fn flag(arg: &Arg) -> String {
    let values: Vec<_> = arg.get_value_names().unwrap_or_default().iter().map(|name| name.as_str()).collect();
    let value = values.join(" ");
    let optional = arg.get_num_args().is_some_and(|range| range.min_values() == 0);
    match arg.get_long() {
        None => value,
        Some(long) if is_switch(arg) => format!("--{long}"),
        Some(long) if optional => format!("--{long} [{value}]"),
        Some(long) => format!("--{long} {value}"),
    }
}

/// The help text as one cell, and the default: the definition's, else the one that the text names in brackets.
fn meaning(arg: &Arg) -> (String, String) {
    let short = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let long = arg.get_long_help().map(ToString::to_string);
    // The first paragraph is written without a full stop, as flags' helps are.
    let paragraphs = long.unwrap_or(short).replacen("\n\n", ". ", 1);
    let mut text = paragraphs.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut default = arg.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).next();
    if let Some(start) = text.find("[default: ")
        && let Some(end) = closing(&text[start..])
    {
        default = Some(text[start + "[default: ".len()..start + end].to_owned());
        text.replace_range(start..=start + end, "");
        text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    }
    let values: Vec<_> = arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    if !values.is_empty() && !is_switch(arg) {
        text = format!("{text} ({})", values.join(", "));
    }
    let default = default.unwrap_or_else(|| if is_switch(arg) { "off".to_owned() } else { "–".to_owned() });
    (cell(&text), cell(&default))
}

/// Where the bracket that opens the text is closed.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0;
    text.char_indices().find_map(|(at, character)| {
        depth += match character {
            '[' => 1,
            ']' => -1,
            _ => 0,
        };
        (depth == 0).then_some(at)
    })
}

/// Text that neither ends the cell nor is taken for HTML.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_has_not_drifted() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/config.md");
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == markdown(),
            "docs/config.md is not what the definitions say: cargo run -- config-reference > docs/config.md"
        );
    }

    #[test]
    fn the_reference_names_every_option() {
        let page = markdown();
        for key in options::keys::<PipelineOptions>().into_iter().chain(options::keys::<ProcessOptions>()) {
            assert!(page.contains(&format!("| `{key}` |")), "{key} is missing");
        }
    }

    #[test]
    fn the_examples_are_config_files() {
        let examples = FILE.split("```toml\n").skip(1).map(|example| example.split_once("```").unwrap().0);
        let parsed: Vec<_> = examples.map(|example| super::super::parse("example", example).unwrap()).collect();
        assert_eq!(parsed.iter().map(|file| file.pipelines.len()).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(parsed[1].pipelines[0].publishers.len(), 3);
    }
}
