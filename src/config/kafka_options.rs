//! `--kafka KEY=VALUE`: settings for librdkafka, also under the names Java's producer has for them.
//!
//! A setting is read in three steps: where it is a Java name it is translated, aliases are reduced to one name, and
//! what would break a guarantee is refused with the reason. Names that librdkafka does not know are left for it to
//! report when the client is made.

use super::problem::{ConfigError, Problem};
use super::secret::Secret;
use super::settings::WindowSettings;
use super::values::Assignment;

/// A setting under librdkafka's name for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KafkaOption {
    pub key: String,
    pub value: OptionValue,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionValue {
    Plain(String),
    /// Not to be shown, and to be followed anew whenever a client is made.
    Secret(Secret),
    /// The password inside a `sasl.jaas.config`.
    JaasPassword(Secret),
}

impl OptionValue {
    /// The value to give to the client now.
    pub fn reveal(&self) -> Result<String, ConfigError> {
        match self {
            OptionValue::Plain(text) => Ok(text.clone()),
            OptionValue::Secret(secret) => secret.reveal(),
            OptionValue::JaasPassword(config) => match jaas_credentials(&config.reveal()?) {
                Ok((_, password)) => Ok(password),
                Err(what) => Err(Problem::new("sasl.jaas.config", what).into()),
            },
        }
    }
}

/// What the guards need to know beside the settings themselves.
pub(super) struct Guard<'a> {
    pub window: &'a WindowSettings,
    /// The user accepts settings that break a guarantee.
    pub off: bool,
}

/// The settings as librdkafka takes them, and the problems, each with the key it is about.
pub(super) fn translate(given: &[Assignment], guard: &Guard<'_>) -> (Vec<KafkaOption>, Vec<(String, String)>) {
    let mut translation = Translation { given, options: Vec::new(), problems: Vec::new() };
    for Assignment { key, value } in given {
        match translation.setting(key, value) {
            Ok(options) => options.into_iter().for_each(|option| translation.add(key, option)),
            Err(what) => translation.problems.push((key.clone(), what)),
        }
    }
    for option in &translation.options {
        let OptionValue::Plain(value) = &option.value else { continue };
        if let Some(Refusal { why, for_good }) = refusal(&option.key, value, guard.window)
            && (for_good || !guard.off)
        {
            let way_out = if for_good { "" } else { " (--unsafe accepts it all the same)" };
            translation.problems.push((option.key.clone(), format!("{why}{way_out}")));
        }
    }
    (translation.options, translation.problems)
}

/// Whether a setting's value must never be shown.
fn is_secret(key: &str) -> bool {
    key.contains("password") || key.contains("secret") || matches!(key, "ssl.key.pem" | "ssl_key" | "ssl.keystore.key")
}

/// One name for what librdkafka knows under several, and librdkafka's for what Java's producer calls otherwise.
pub(super) fn canonical(key: &str) -> &str {
    match key {
        "acks" => "request.required.acks",
        "delivery.timeout.ms" => "message.timeout.ms",
        "retries" => "message.send.max.retries",
        "linger.ms" => "queue.buffering.max.ms",
        "compression.codec" => "compression.type",
        "max.in.flight" => "max.in.flight.requests.per.connection",
        "sasl.mechanism" => "sasl.mechanisms",
        "metadata.broker.list" => "bootstrap.servers",
        "max.request.size" => "message.max.bytes",
        "send.buffer.bytes" => "socket.send.buffer.bytes",
        "receive.buffer.bytes" => "socket.receive.buffer.bytes",
        "compression.gzip.level" | "compression.lz4.level" | "compression.zstd.level" => "compression.level",
        "ssl.truststore.certificates" => "ssl.ca.pem",
        "ssl.keystore.certificate.chain" => "ssl.certificate.pem",
        "ssl.keystore.key" => "ssl.key.pem",
        "partitioner.class" => "partitioner",
        _ => key,
    }
}

struct Translation<'a> {
    given: &'a [Assignment],
    options: Vec<KafkaOption>,
    problems: Vec<(String, String)>,
}

impl Translation<'_> {
    fn add(&mut self, key: &str, option: KafkaOption) {
        match self.options.iter().find(|there| there.key == option.key) {
            Some(there) if there.value == option.value => {}
            Some(_) => self.problems.push((
                key.to_owned(),
                format!("`{}` is set twice, under different names and to different values", option.key),
            )),
            None => self.options.push(option),
        }
    }

    /// What one given setting means to librdkafka.
    fn setting(&self, key: &str, value: &str) -> Result<Vec<KafkaOption>, String> {
        if key.is_empty() {
            return Err("KEY=VALUE is expected".to_owned());
        }
        let secret = Secret::from(value);
        if is_secret(key) && key != "ssl.truststore.password" {
            self.check_readable(&secret)?;
            return Ok(vec![KafkaOption { key: canonical(key).to_owned(), value: OptionValue::Secret(secret) }]);
        }
        let text = secret.reveal().map_err(|error| error.to_string())?;
        let option = |key: &str, value: &str| {
            vec![KafkaOption { key: key.to_owned(), value: OptionValue::Plain(value.to_owned()) }]
        };
        match key {
            "sasl.jaas.config" => {
                let (user, _) = jaas_credentials(&text)?;
                let mut both = option("sasl.username", &user);
                both.push(KafkaOption { key: "sasl.password".to_owned(), value: OptionValue::JaasPassword(secret) });
                Ok(both)
            }
            "ssl.truststore.type" | "ssl.keystore.type" => match text.to_ascii_uppercase().as_str() {
                "PEM" | "PKCS12" | "JKS" => Ok(Vec::new()),
                _ => Err("the known store types are PEM, PKCS12 and JKS".to_owned()),
            },
            "ssl.truststore.location" => match self.store_type("ssl.truststore.type", &text)? {
                Store::Pem => Ok(option("ssl.ca.location", &text)),
                Store::Pkcs12 | Store::Jks => Err(format!(
                    "only PEM trust stores can be read; export it with `keytool -exportcert -rfc -keystore {text} \
                     -alias ALIAS -file ca.pem` and give ssl.ca.location=ca.pem"
                )),
            },
            "ssl.truststore.password" => Err("a PEM trust store has no password: leave this out".to_owned()),
            "ssl.keystore.location" => match self.store_type("ssl.keystore.type", &text)? {
                // A PEM key store of Java's holds the key and the chain: librdkafka takes each from the same file.
                Store::Pem => {
                    let mut both = option("ssl.certificate.location", &text);
                    both.extend(option("ssl.key.location", &text));
                    Ok(both)
                }
                Store::Pkcs12 => Ok(option("ssl.keystore.location", &text)),
                Store::Jks => Err(format!(
                    "JKS key stores cannot be read; convert it with `keytool -importkeystore -srckeystore {text} \
                     -destkeystore client.p12 -deststoretype PKCS12`, then `openssl pkcs12 -in client.p12 -nodes -out \
                     client.pem`, and give ssl.keystore.location=client.pem"
                )),
            },
            // Java turns the check of the broker's name off by an empty text.
            "ssl.endpoint.identification.algorithm" => {
                let algorithm = if text.is_empty() { "none".to_owned() } else { text.to_ascii_lowercase() };
                Ok(option(key, &algorithm))
            }
            "buffer.memory" => {
                let bytes: u64 = text.parse().map_err(|_| "a number of bytes is expected".to_owned())?;
                Ok(option("queue.buffering.max.kbytes", &bytes.div_ceil(1024).to_string()))
            }
            "key.serializer" | "value.serializer" => {
                Err("keys and values are sent as the bytes of their columns: leave this out".to_owned())
            }
            _ => Ok(option(canonical(key), &text)),
        }
    }

    fn check_readable(&self, secret: &Secret) -> Result<(), String> {
        secret.reveal().map(drop).map_err(|error| error.to_string())
    }

    /// A store's type as said, else as its file's name says.
    fn store_type(&self, type_key: &str, location: &str) -> Result<Store, String> {
        let said = self.given.iter().find(|one| one.key == type_key).map(|one| one.value.to_ascii_uppercase());
        let ending = location.rsplit_once('.').map(|(_, ending)| ending.to_ascii_lowercase());
        match (said.as_deref(), ending.as_deref()) {
            (Some("PEM"), _) => Ok(Store::Pem),
            (Some("PKCS12"), _) => Ok(Store::Pkcs12),
            (Some(_), _) => Ok(Store::Jks),
            (None, Some("pem" | "crt" | "cer" | "key")) => Ok(Store::Pem),
            (None, Some("p12" | "pfx")) => Ok(Store::Pkcs12),
            (None, Some("jks" | "keystore" | "truststore")) => Ok(Store::Jks),
            (None, _) => Err(format!("its type cannot be told from its name: say {type_key}=PEM")),
        }
    }
}

enum Store {
    Pem,
    Pkcs12,
    Jks,
}

/// User and password of a JAAS line: `…PlainLoginModule required username="app" password="…";`.
fn jaas_credentials(config: &str) -> Result<(String, String), String> {
    let module = config.split_whitespace().next().unwrap_or_default();
    if !module.ends_with("PlainLoginModule") && !module.ends_with("ScramLoginModule") {
        return Err(
            "only PlainLoginModule and ScramLoginModule are understood; give sasl.username and sasl.password, \
                    or the settings librdkafka has for this mechanism"
                .to_owned(),
        );
    }
    let field = |name: &str| jaas_field(config, name).ok_or_else(|| format!("it has no {name}=\"…\""));
    Ok((field("username")?, field("password")?))
}

/// A field's value: in double or single quotes, in which a backslash escapes, or bare up to a blank or `;`.
fn jaas_field(config: &str, name: &str) -> Option<String> {
    let mut rest = config;
    loop {
        let at = rest.find(name)?;
        let alone = rest[..at].chars().next_back().is_none_or(char::is_whitespace);
        rest = &rest[at + name.len()..];
        if let Some(value) = rest.trim_start().strip_prefix('=').filter(|_| alone) {
            return jaas_value(value.trim_start());
        }
    }
}

fn jaas_value(text: &str) -> Option<String> {
    let quote = text.chars().next().filter(|first| matches!(first, '"' | '\''));
    let Some(quote) = quote else {
        return text.split(|end: char| end.is_whitespace() || end == ';').next().map(str::to_owned);
    };
    let mut value = String::new();
    let mut characters = text.chars().skip(1);
    while let Some(character) = characters.next() {
        match character {
            '\\' => value.push(characters.next()?),
            end if end == quote => return Some(value),
            other => value.push(other),
        }
    }
    None
}

struct Refusal {
    why: String,
    /// Not even --unsafe makes it work.
    for_good: bool,
}

/// Why a setting, under its canonical name, would break a guarantee.
fn refusal(key: &str, value: &str, window: &WindowSettings) -> Option<Refusal> {
    let number = value.parse::<u64>().ok();
    let falsy = matches!(value.to_ascii_lowercase().as_str(), "false" | "f" | "0" | "no");
    let below = |least: usize| number.is_some_and(|number| number < least as u64);
    let why: Option<String> = match key {
        "request.required.acks" => (!matches!(value, "all" | "-1")).then(|| {
            "a record that not all in-sync replicas hold is lost with its leader, yet its position would be confirmed; \
             only acks=all keeps every event"
                .into()
        }),
        "enable.idempotence" => falsy
            .then(|| "without idempotence a retried batch may arrive twice or overtake another of the same key".into()),
        "enable.gapless.guarantee" => {
            falsy.then(|| "without it later records of a key may be delivered after one of them has failed".into())
        }
        "partitioner" => (!matches!(value, "murmur2" | "murmur2_random")).then(|| {
            "keys would land on other partitions than Java producers put them on, and change partition for consumers; \
             murmur2_random and murmur2 agree with Java"
                .into()
        }),
        "partitioner.ignore.keys" => {
            (!falsy).then(|| "records of one key would be spread over the partitions and lose their order".into())
        }
        "message.timeout.ms" => (number != Some(0)).then(|| {
            "records that time out during an outage would be sent again out of order; 0, no time-out, is needed, and \
             outages are waited out"
                .into()
        }),
        "message.send.max.retries" => below(i32::MAX as usize).then(|| {
            format!("records that run out of retries would be sent again out of order; {} is needed", i32::MAX)
        }),
        "max.in.flight.requests.per.connection" => (number.is_none_or(|number| number > 5))
            .then(|| "an idempotent producer keeps the order of at most 5 requests in flight".into()),
        "queuing.strategy" => (value != "fifo").then(|| "records of a key would lose their order".into()),
        "queue.buffering.max.messages" => (number != Some(0) && below(window.max_events)).then(|| {
            format!("the producer's queue must hold the whole window of {} events (--max-in-flight)", window.max_events)
        }),
        "queue.buffering.max.kbytes" => below(window.max_bytes.div_ceil(1024)).then(|| {
            format!(
                "the producer's queue must hold the whole window of {} KiB (--max-in-flight-bytes)",
                window.max_bytes.div_ceil(1024)
            )
        }),
        "delivery.report.only.error" if !falsy => {
            let why = "without reports of success no position could ever be confirmed".into();
            return Some(Refusal { why, for_good: true });
        }
        "transactional.id" => {
            let why = "--delivery exactly-once chooses it, by the pipeline's name".into();
            return Some(Refusal { why, for_good: true });
        }
        _ => None,
    };
    why.map(|why| Refusal { why, for_good: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: WindowSettings = WindowSettings { max_events: 1000, max_bytes: 1 << 20 };

    fn translated(pairs: &[&str], off: bool) -> (Vec<KafkaOption>, Vec<(String, String)>) {
        let given: Vec<Assignment> = pairs.iter().map(|pair| pair.parse().unwrap()).collect();
        translate(&given, &Guard { window: &WINDOW, off })
    }

    #[track_caller]
    fn accepted(pairs: &[&str]) -> String {
        let (options, problems) = translated(pairs, false);
        assert!(problems.is_empty(), "{pairs:?}: {problems:?}");
        let shown = options.iter().map(|option| format!("{}={}", option.key, option.value.reveal().unwrap()));
        shown.collect::<Vec<_>>().join(" ")
    }

    #[track_caller]
    fn refused(pairs: &[&str]) -> String {
        let (_, problems) = translated(pairs, false);
        assert!(!problems.is_empty(), "{pairs:?} was accepted");
        problems.into_iter().map(|(key, what)| format!("{key}: {what}")).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn names_of_javas_producer_become_librdkafkas() {
        for (given, becomes) in [
            ("sasl.mechanism=SCRAM-SHA-512", "sasl.mechanisms=SCRAM-SHA-512"),
            ("max.request.size=2000000", "message.max.bytes=2000000"),
            ("buffer.memory=33554433", "queue.buffering.max.kbytes=32769"),
            ("linger.ms=5", "queue.buffering.max.ms=5"),
            ("batch.size=100000", "batch.size=100000"),
            ("compression.type=zstd", "compression.type=zstd"),
            ("acks=all", "request.required.acks=all"),
            ("acks=-1", "request.required.acks=-1"),
            ("enable.idempotence=true", "enable.idempotence=true"),
            ("delivery.timeout.ms=0", "message.timeout.ms=0"),
            ("retries=2147483647", "message.send.max.retries=2147483647"),
            ("max.in.flight.requests.per.connection=5", "max.in.flight.requests.per.connection=5"),
            ("ssl.endpoint.identification.algorithm=", "ssl.endpoint.identification.algorithm=none"),
            ("ssl.endpoint.identification.algorithm=HTTPS", "ssl.endpoint.identification.algorithm=https"),
            ("ssl.truststore.location=/etc/ca.pem", "ssl.ca.location=/etc/ca.pem"),
            ("ssl.keystore.location=/c.p12", "ssl.keystore.location=/c.p12"),
            ("ssl.keystore.location=/c.pem", "ssl.certificate.location=/c.pem ssl.key.location=/c.pem"),
            ("request.timeout.ms=30000", "request.timeout.ms=30000"),
            ("retry.backoff.ms=100", "retry.backoff.ms=100"),
            ("client.id=shop", "client.id=shop"),
            ("made.up=1", "made.up=1"),
            ("queue.buffering.max.messages=0", "queue.buffering.max.messages=0"),
        ] {
            assert_eq!(accepted(&[given]), becomes);
        }
        assert_eq!(accepted(&["ssl.truststore.type=PEM", "ssl.truststore.location=/ca"]), "ssl.ca.location=/ca");
    }

    #[test]
    fn librdkafka_knows_every_name_that_is_translated_to() {
        for given in [
            "acks=all",
            "delivery.timeout.ms=0",
            "retries=2147483647",
            "linger.ms=5",
            "compression.codec=lz4",
            "max.in.flight=5",
            "sasl.mechanism=PLAIN",
            "max.request.size=1000000",
            "send.buffer.bytes=0",
            "receive.buffer.bytes=0",
            "compression.zstd.level=3",
            "partitioner=murmur2_random",
            "enable.gapless.guarantee=true",
            "queuing.strategy=fifo",
            "buffer.memory=33554432",
            "ssl.endpoint.identification.algorithm=",
            "ssl.truststore.location=/ca.pem",
            "ssl.keystore.location=/c.pem",
            "ssl.keystore.location=/c.p12",
            "ssl.keystore.password=x",
            "ssl.key.password=x",
            "sasl.jaas.config=x.PlainLoginModule required username=a password=b;",
        ] {
            let (options, _) = translated(&[given], false);
            let mut client = rdkafka::ClientConfig::new();
            for option in options {
                client.set(option.key, option.value.reveal().unwrap());
            }
            let made = client.create_native_config();
            assert!(made.is_ok(), "{given}: {:?}", made.err());
        }
    }

    #[test]
    fn acks_one_is_refused_with_the_reason() {
        assert!(refused(&["acks=1"]).starts_with("request.required.acks: a record that not all in-sync replicas hold"));
    }

    #[test]
    fn what_would_break_a_guarantee_is_refused_unless_unsafe() {
        for given in [
            "acks=0",
            "acks=1",
            "request.required.acks=1",
            "enable.idempotence=false",
            "partitioner=consistent_random",
            "partitioner.class=RoundRobin",
            "partitioner.ignore.keys=true",
            "message.timeout.ms=300000",
            "delivery.timeout.ms=120000",
            "enable.gapless.guarantee=false",
            "max.in.flight=6",
            "retries=3",
            "message.send.max.retries=0",
            "queuing.strategy=lifo",
            "queue.buffering.max.messages=999",
            "queue.buffering.max.kbytes=1023",
            "buffer.memory=1000",
        ] {
            assert!(refused(&[given]).contains("--unsafe"), "{given}");
            let (options, problems) = translated(&[given], true);
            assert!(problems.is_empty() && options.len() == 1, "{given}: {problems:?}");
        }
    }

    #[test]
    fn what_could_never_work_is_refused_even_if_unsafe() {
        for given in ["transactional.id=x", "delivery.report.only.error=true"] {
            let (_, problems) = translated(&[given], true);
            assert_eq!(problems.len(), 1, "{given}");
        }
    }

    #[test]
    fn a_reference_cannot_smuggle_a_setting_past_the_guard() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("acks");
        std::fs::write(&path, "1\n").unwrap();
        assert!(refused(&[&format!("acks=file:{}", path.display())]).contains("in-sync"));
    }

    #[test]
    fn jks_stores_get_the_way_to_pem() {
        assert!(refused(&["ssl.truststore.location=/etc/trust.jks"]).contains("keytool -exportcert"));
        assert!(refused(&["ssl.keystore.location=/etc/key.jks"]).contains("openssl pkcs12"));
        assert!(refused(&["ssl.keystore.type=JKS", "ssl.keystore.location=/etc/key"]).contains("openssl pkcs12"));
        assert!(refused(&["ssl.keystore.location=/etc/key"]).contains("say ssl.keystore.type=PEM"));
    }

    #[test]
    fn a_jaas_line_gives_user_and_password() {
        let plain =
            "org.apache.kafka.common.security.plain.PlainLoginModule required username=\"app\" password=\"a\\\"b;c\";";
        assert_eq!(accepted(&[&format!("sasl.jaas.config={plain}")]), "sasl.username=app sasl.password=a\"b;c");
        let scram = "org.apache.kafka.common.security.scram.ScramLoginModule required password='p' username=app;";
        assert_eq!(accepted(&[&format!("sasl.jaas.config={scram}")]), "sasl.username=app sasl.password=p");
        for broken in [
            "com.sun.security.auth.module.Krb5LoginModule required;",
            "x.PlainLoginModule required username=\"a\";",
            "x.PlainLoginModule required username=\"a\" password=\"b",
            "",
        ] {
            refused(&[&format!("sasl.jaas.config={broken}")]);
        }
    }

    #[test]
    fn secrets_are_kept_back_and_read_anew() {
        let (options, _) =
            translated(&["sasl.password=hunter2", "ssl.key.pem=hunter2", "ssl.key.password=hunter2"], false);
        assert_eq!(options.len(), 3);
        let jaas = "sasl.jaas.config=x.PlainLoginModule required username=\"a\" password=\"hunter2\";";
        let (jaas, _) = translated(&[jaas], false);
        assert!(!format!("{options:?} {jaas:?}").contains("hunter2"));
        assert!(refused(&["sasl.password=file:/nowhere/at/all"]).contains("cannot be read"));
    }

    #[test]
    fn one_setting_under_two_names_must_agree() {
        assert_eq!(accepted(&["acks=all", "request.required.acks=all"]), "request.required.acks=all");
        assert!(refused(&["linger.ms=5", "queue.buffering.max.ms=6"]).contains("set twice"));
    }
}
