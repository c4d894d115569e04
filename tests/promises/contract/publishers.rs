//! Several publishers of one reading, on every database.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{Outbox, PATIENCE, Relay, Source, Topic, eventually, outboxd};

promised!(each_publisher_gets_everything_in_order_through_kills_and_a_pause to postgres, mysql, mariadb, mongodb);

fn configured(outbox: &Outbox, one: &Topic, other: &Topic) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let text = format!(
        "[pipeline.shop]\nsource = {:?}\nbrokers = {:?}\ncheckpoint-interval = \"200ms\"\n\
         [pipeline.shop.publisher.one]\ntopic = {:?}\n[pipeline.shop.publisher.other]\ntopic = {:?}\n",
        outbox.url(),
        one.brokers,
        one.name,
        other.name
    );
    std::fs::write(file.path(), text).expect("the configuration is written");
    file
}

async fn order(relay: &Relay, verb: &str) {
    let admin = relay.admin().await;
    eventually(PATIENCE, &format!("{verb} is obeyed"), async || {
        let ended = outboxd(&[verb, "shop/other", "--admin", &admin]).await;
        (ended.code == 0).then_some(())
    })
    .await;
}

async fn each_publisher_gets_everything_in_order_through_kills_and_a_pause(source: Source) {
    let outbox = Outbox::create(source).await;
    let (one, other) = (Topic::create(3).await, Topic::create(3).await);
    let file = configured(&outbox, &one, &other);
    let arguments = ["run", "--config", file.path().to_str().expect("a path")];
    let mut relay = Relay::spawn(&arguments);
    relay.until_state("streaming").await;
    let enough = Arc::new(AtomicBool::new(false));
    let (writer, stopped) = (outbox.writer().await, enough.clone());
    let load = tokio::spawn(async move {
        while !stopped.load(Ordering::Relaxed) {
            writer.commit(&["a", "b", "c"]).await;
            tokio::time::sleep(std::time::Duration::from_millis(3)).await;
        }
    });
    let (mut first, mut second) = (one.reader(), other.reader());
    let mut seen = (first.take(100).await, second.take(100).await);
    relay.kill();
    relay = Relay::spawn(&arguments);
    relay.until_state("streaming").await;
    order(&relay, "pause").await;
    seen.0.extend(first.take(300).await);
    relay.kill();
    relay = Relay::spawn(&arguments);
    relay.until_state("streaming").await;
    seen.0.extend(first.take(300).await);
    let status = relay.status().await;
    assert_eq!(status["publishers"][1]["state"], "paused", "{status}");
    order(&relay, "resume").await;
    seen.1.extend(second.take(300).await);
    enough.store(true, Ordering::Relaxed);
    load.await.expect("the load was written");
    let expected = outbox.expected().await;
    let delivered = (
        expected.arrive_in(&mut one.reader(), PATIENCE).await,
        expected.arrive_in(&mut other.reader(), PATIENCE).await,
    );
    println!("{delivered:?}");
    assert!(delivered.0.events > 500 && delivered.0.events == delivered.1.events);
    relay.stop().await;
}

promised!(a_publisher_with_its_own_position_goes_on_while_the_others_are_paused to postgres, mysql, mariadb, mongodb);

async fn a_publisher_with_its_own_position_goes_on_while_the_others_are_paused(source: Source) {
    let outbox = Outbox::create(source).await;
    let (one, other) = (Topic::create(1).await, Topic::create(1).await);
    let file = configured(&outbox, &one, &other);
    let text = std::fs::read_to_string(file.path()).expect("the configuration is read");
    let text = text
        .replace("[pipeline.shop.publisher.other]", "[pipeline.shop.publisher.other]\nisolation = \"own-position\"");
    std::fs::write(file.path(), text).expect("the configuration is written");
    let relay = Relay::spawn(&["run", "--config", file.path().to_str().expect("a path")]);
    let states = async || {
        let page: serde_json::Value = serde_json::from_str(&relay.get("/status").await).expect("/status is JSON");
        let pipelines = page["pipelines"].as_array().expect("pipelines").clone();
        pipelines.iter().map(|one| format!("{} {}", one["name"], one["state"]).replace('"', "")).collect::<Vec<_>>()
    };
    let both = ["shop streaming", "shop-other streaming"];
    eventually(PATIENCE, "both stream", async || (states().await == both).then_some(())).await;
    let paused = outboxd(&["pause", "shop", "--admin", &relay.admin().await]).await;
    assert_eq!(paused.code, 0, "{}", paused.stderr);
    let writer = outbox.writer().await;
    for _ in 0..20 {
        writer.commit(&["a", "b"]).await;
    }
    let expected = outbox.expected().await;
    let delivered = expected.arrive_in(&mut other.reader(), PATIENCE).await;
    assert_eq!((delivered.events, delivered.duplicates), (40, 0));
    assert_eq!(one.reader().rest().await.len(), 0);
    let resumed = outboxd(&["resume", "shop", "--admin", &relay.admin().await]).await;
    assert_eq!(resumed.code, 0, "{}", resumed.stderr);
    assert_eq!(expected.arrive_in(&mut one.reader(), PATIENCE).await.events, 40);
    relay.stop().await;
}
