//! Every step of the data's path dies, dawdles and fails, on every source and with both promises of delivery.
//!
//! All of it under `tests/run --full`; otherwise a sample, which the seed chooses (OUTBOXD_TEST_SEED).

use std::time::Duration;

use outboxd::failpoints::STEPS;

use crate::support::{Dice, Outbox, PATIENCE, Relay, Source, Topic};

const KEYS: [&str; 5] = ["a", "b", "c", "d", "e"];
const COMMITS: usize = 80;
/// Of each source and delivery, unless all is asked for.
const SAMPLE: usize = 4;

#[derive(Clone, Copy, Debug)]
enum Fate {
    Kill,
    Delay,
    Error,
}

impl Fate {
    const ALL: [Fate; 3] = [Fate::Kill, Fate::Delay, Fate::Error];

    /// As failpoints take it, after the step was passed a few times.
    fn after(self, passed: u64) -> String {
        match self {
            Fate::Kill => format!("{passed}*off->return(kill)"),
            Fate::Delay => format!("{passed}*off->4*sleep(700)->off"),
            Fate::Error => format!("{passed}*off->3*return(error)->off"),
        }
    }
}

promised!(any_step_may_die_dawdle_or_fail_and_nothing_is_lost_or_out_of_order to postgres, mysql, mariadb, mongodb);

async fn any_step_may_die_dawdle_or_fail_and_nothing_is_lost_or_out_of_order(source: Source) {
    walk(source, &[]).await;
}

promised!(any_step_may_die_dawdle_or_fail_and_every_event_arrives_exactly_once to postgres, mysql, mariadb, mongodb);

async fn any_step_may_die_dawdle_or_fail_and_every_event_arrives_exactly_once(source: Source) {
    walk(source, &["--delivery", "exactly-once"]).await;
}

async fn walk(source: Source, flags: &[&str]) {
    let transactional = |step: &&str| ["committing", "committed"].contains(step);
    let steps = STEPS.iter().filter(|step| !flags.is_empty() || !transactional(step));
    let mut cases: Vec<(&str, Fate)> = steps.flat_map(|step| Fate::ALL.map(|fate| (*step, fate))).collect();
    let seed = std::env::var("OUTBOXD_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_118);
    let mut dice = Dice::seeded(seed + source as u64 * 2 + u64::from(flags.is_empty()));
    if std::env::var_os("OUTBOXD_TEST_FULL").is_none() {
        while cases.len() > SAMPLE {
            let out = dice.roll(cases.len() as u64) as usize;
            cases.swap_remove(out);
        }
    }
    for (step, fate) in cases {
        let passed = if step.starts_with("stor") { dice.roll(2) } else { dice.roll(20) };
        println!("{source:?} {flags:?} seed {seed}: {step} {fate:?} after {passed}");
        survives(source, flags, step, fate, passed).await;
    }
}

async fn survives(source: Source, flags: &[&str], step: &str, fate: Fate, passed: u64) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(2).await;
    // The pipeline has a position before anything goes wrong.
    outbox.streaming(&topic, flags).await.stop().await;
    let asked_for = format!("{step}={}", fate.after(passed));
    let url = outbox.url();
    let run = ["run", &url, "--brokers", &topic.brokers, "--topic", &topic.name, "--checkpoint-interval", "200ms"];
    let run = [&run[..], flags].concat();
    let mut relay = Relay::spawn_with(&[("FAILPOINTS", &asked_for)], &run);
    let writer = outbox.writer().await;
    for _ in 0..COMMITS {
        writer.commit(&KEYS).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    if let Fate::Kill = fate {
        // As often as it takes, for a step that a busy relay seldom comes to.
        let mut writes = 0;
        while relay.is_running() {
            writer.commit(&KEYS).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
            writes += 1;
            assert!(writes < 3000, "it never came to {step}: {}", relay.log());
        }
        relay = Relay::spawn(&run);
    }
    let delivered = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    if !flags.is_empty() {
        assert_eq!(delivered.duplicates, 0, "events came twice after {step} {fate:?}");
    }
    relay.stop().await;
}
