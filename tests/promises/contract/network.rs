//! A network that cuts, swallows, resets, drips, dawdles and chokes, between relay and database and between relay and broker.

use std::time::{Duration, Instant};

use crate::support::{Fault, Outbox, PATIENCE, PrivateKafka, Proxy, Relay, Source, Topic};

const KEYS: [&str; 3] = ["a", "b", "c"];
const FAULTS: [Fault; 7] = [
    Fault::Cut,
    Fault::Silence,
    Fault::HalfOpen,
    Fault::Reset(3001),
    Fault::Drip,
    Fault::Latency(Duration::from_millis(150)),
    Fault::Slow(20_000),
];

promised!(network_faults_on_the_way_to_the_database_lose_and_reorder_nothing to postgres, mysql, mariadb, mongodb);

async fn network_faults_on_the_way_to_the_database_lose_and_reorder_nothing(source: Source) {
    let outbox = Outbox::create(source).await;
    outbox.drop_silent_readers().await;
    let topic = Topic::create(2).await;
    let proxy = Proxy::before(&outbox.url()).await;
    let mut relay = Relay::start_at(&by_way_of(&proxy, &outbox), &topic, &["--stall-timeout", "3s"]);
    relay.until_state("streaming").await;
    weather_all(&outbox, &topic, &proxy).await;
    assert!(relay.is_running(), "it recovers without a person");
    relay.stop().await;
}

promised!(network_faults_on_the_way_to_the_broker_lose_and_reorder_nothing to postgres, mysql);

async fn network_faults_on_the_way_to_the_broker_lose_and_reorder_nothing(source: Source) {
    let (kafka, proxy) = PrivateKafka::start_with_detour().await;
    let outbox = Outbox::create(source).await;
    let topic = Topic::create_at(&kafka.brokers(), 2, &[]).await;
    let brokers = format!("127.0.0.1:{}", proxy.port());
    let by_detour = Topic { name: topic.name.clone(), brokers, partitions: topic.partitions };
    let impatient = ["--kafka", "socket.timeout.ms=3000", "--kafka", "reconnect.backoff.max.ms=500"];
    let mut relay = outbox.streaming(&by_detour, &impatient).await;
    weather_all(&outbox, &topic, &proxy).await;
    assert!(relay.is_running(), "it recovers without a person");
    relay.stop().await;
}

/// Each fault in turn, under load; after each everything arrives.
async fn weather_all(outbox: &Outbox, topic: &Topic, proxy: &Proxy) {
    let writer = outbox.writer().await;
    for fault in FAULTS {
        proxy.set(fault);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(4) {
            writer.commit(&KEYS).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        proxy.set(Fault::None);
        let mended = Instant::now();
        let delivered = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
        println!("{fault:?}: {delivered:?}, all there {:?} after it was mended", mended.elapsed());
    }
}

promised!(standby_takes_over_when_the_leader_is_cut_off to postgres, mongodb);

/// Five seconds after the server, or the lease, has given the silent leader up.
async fn standby_takes_over_when_the_leader_is_cut_off(source: Source) {
    let outbox = Outbox::create(source).await;
    outbox.drop_silent_readers().await;
    let topic = Topic::create(2).await;
    let proxy = Proxy::before(&outbox.url()).await;
    let mut leader = Relay::start_at(&by_way_of(&proxy, &outbox), &topic, &["--stall-timeout", "3s"]);
    leader.until_state("streaming").await;
    let mut standby = outbox.relay(&topic, &[]);
    standby.until_state("standing-by").await;
    let writer = outbox.writer().await;
    writer.commit(&["before"]).await;
    let mut reader = topic.reader();
    reader.take(1).await;
    proxy.fall_silent();
    let cut = Instant::now();
    writer.commit(&["after"]).await;
    reader.take(1).await;
    let took = cut.elapsed();
    println!("taken over after {took:?}");
    assert!(took < Duration::from_secs(5 + 5), "the standby delivered after {took:?}");
    outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    standby.stop().await;
}

/// The address of the outbox, through the proxy. A replica set would tell the way around it.
fn by_way_of(proxy: &Proxy, outbox: &Outbox) -> String {
    let url = proxy.url(&outbox.url());
    match outbox.source {
        Source::MongoDb => {
            let (url, query) = url.split_once('?').unwrap_or((&url, ""));
            let kept: Vec<&str> = query.split('&').filter(|part| !part.starts_with("replicaSet=")).collect();
            let quick = "directConnection=true&serverSelectionTimeoutMS=3000&connectTimeoutMS=2000";
            format!("{url}?{}", [kept.join("&").as_str(), quick].join("&"))
        }
        _ => url,
    }
}
