//! The page for people, in a real Chromium: what is on screen changes when the pipeline does, and the other way round.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::shop::{Shop, add, closed, http, outbox, taking};
use crate::support::{Answer, Browser, Database, HttpServer, Relay, Topic};

const CARD: &str = "[data-pipeline=shop]";

fn of_publisher(name: &str, what: &str) -> String {
    format!("{CARD} [data-publisher={name}] {what}")
}

/// A server that refuses what has a `7` in its total until it is told otherwise.
async fn picky() -> (HttpServer, Arc<AtomicBool>) {
    let good = Arc::new(AtomicBool::new(false));
    let answers = good.clone();
    let server = HttpServer::start(move |request| {
        let refused = !answers.load(Ordering::Relaxed) && request.body.windows(5).any(|bytes| bytes == b"10007");
        Answer::Status(if refused { 422 } else { 200 })
    })
    .await;
    (server, good)
}

const POISON: &str = r#"INSERT INTO outbox (partition_key, event_type, payload, headers) VALUES
    ('customer-17', 'invoice.sent', '{"n": 12345678901234567890, "total": 10007, "note": "<img src=x onerror=alert(1)>"}', '{"trace": "<b>00-4bf9</b>"}')"#;

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_appear_on_the_page_with_their_payload_and_are_replayed_by_its_button() {
    let database = outbox().await;
    let (server, good) = picky().await;
    let lines = format!(
        "sink = {:?}\nlanes = 1\nhttp-batch = 1\nmax-retries = 0\ndead-letter = \"table:dead_letters\"",
        server.url()
    );
    let shop = Shop::new(&database, &lines);
    let mut relay = Relay::spawn(&["run", "--config", shop.path(), "--admin-token", "s3cret"]);
    relay.until_streaming(&database).await;
    relay.until_state("streaming").await;
    let mut browser = Browser::open(&format!("http://{}/", relay.admin().await)).await;
    let letters = format!("{CARD} [data-letters]");
    let row = format!("{letters} [data-letter]");
    browser.see(&format!("{letters} summary"), "table dead_letters").await;

    // With a token, payloads are for those who have it.
    browser.click(&format!("{letters} summary")).await;
    browser.see("#token", "Admin token").await;
    browser.write("wrong").await;
    browser.press("#token button[type=submit]", "Enter").await;
    browser.see("#token", "That was not the admin token").await;
    assert_eq!(browser.barriers().await, Vec::<serde_json::Value>::new(), "also with a dialog open");
    browser.write("s3cret").await;
    browser.press("#token button[type=submit]", "Enter").await;
    browser.miss("#token").await;
    browser.see(&letters, "There are none.").await;

    // One appears while somebody looks.
    database.execute(POISON).await;
    add(&database, 0, 5).await;
    browser.see(&row, "422").await;
    browser.see(&format!("{CARD} dd[data-dead-letters]"), "1").await;
    browser.click(&format!("{row} [data-show]")).await;
    // Its payload is text, with every digit, whatever is in it.
    browser.see("#letter [data-payload]", "12345678901234567890").await;
    browser.see("#letter [data-payload]", "<img src=x onerror=alert(1)>").await;
    browser.see("#letter [data-headers]", "<b>00-4bf9</b>").await;
    browser.see("#letter [data-facts]", "customer-17").await;
    assert_eq!(browser.barriers().await, Vec::<serde_json::Value>::new());
    browser.press("#letter [data-close]", "Enter").await;

    // It is refused again, and then delivered.
    browser.click(&format!("{row} [data-replay]")).await;
    browser.see("#said", "was refused again").await;
    browser.see(&format!("{row} [data-replayed]"), "no").await;
    good.store(true, Ordering::Relaxed);
    browser.click(&format!("{row} [data-replay]")).await;
    browser.see("#said", "was delivered").await;
    browser.see(&format!("{row} [data-replayed]"), "20").await;
    let delivered = server.taken().iter().any(|request| request.body.windows(5).any(|bytes| bytes == b"10007"));
    assert!(delivered, "the letter has arrived");
    assert!(database.text("SELECT replayed_at::text FROM dead_letters").await.is_some());

    // The token is kept as long as the tab is.
    browser.reload().await;
    browser.click(&format!("{letters} summary")).await;
    browser.see(&row, "422").await;
    assert_eq!(browser.barriers().await, Vec::<serde_json::Value>::new());
    let (_, errors) = browser.requests_and_errors().await;
    // Chromium itself says that a request was refused.
    let ours: Vec<_> = errors.iter().filter(|error| !error.starts_with("Failed to load resource")).collect();
    assert!(ours.is_empty(), "{ours:?}");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_another_place_in_the_same_browser_changes_nothing() {
    let database = outbox().await;
    let server = taking().await;
    let shop = Shop::new(&database, &format!("sink = {:?}", server.url()));
    let relay = shop.run(&database).await;
    let admin = relay.admin().await;
    let mut browser = Browser::open(&format!("http://{admin}/")).await;
    browser.see(&format!("{CARD} > header [data-badge]"), "Streaming").await;
    let order = format!("http://{admin}/pipelines/shop/pause");
    let tried = browser.from_elsewhere(&server.url(), "POST", &order).await;
    assert!(tried[0].as_str().is_some_and(|what| what.contains("Failed to fetch")), "{tried}");
    assert_eq!(tried[1], "opaque 0", "it was sent, and what came back is nobody's: {tried}");
    assert_eq!(relay.status().await["state"], "streaming");
    // The page itself may.
    browser.click("role=button[name='Pause shop']").await;
    browser.see(&format!("{CARD} > header [data-badge]"), "Paused").await;
    relay.stop().await;
}

/// What is shown in the README; taken anew with OUTBOXD_TEST_PICTURE=docs/page.png.
#[tokio::test(flavor = "multi_thread")]
async fn several_pipelines_in_different_states_fit_on_the_page() {
    let (one, other): (Database, Database) = (outbox().await, outbox().await);
    let topic = Topic::create(1).await;
    let (server, _) = picky().await;
    let (away, _closed) = closed().await;
    let fine = taking().await;
    let dead = "dead-letter = \"table:dead_letters\"\nmax-retries = 0\n";
    let orders = format!(
        "[pipeline.orders]\nsource = {:?}\nslot = {:?}\nbrokers = {:?}\ntopic = {:?}\n{dead}",
        one.url(),
        one.slot(),
        topic.brokers,
        topic.name
    );
    let shop = format!("[pipeline.shop]\nsource = {:?}\nslot = {:?}\n{dead}", other.url(), other.slot());
    let publishers = [
        http("archive", &fine, ""),
        http("partners", &server, "http-batch = 1\n"),
        http("search", &away, "only-type = \"order.*\""),
    ];
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), orders + &shop + &publishers.concat()).expect("the configuration is written");
    let relay = Relay::spawn(&["run", "--config", file.path().to_str().expect("a path")]);
    let mut browser = Browser::open(&format!("http://{}/", relay.admin().await)).await;
    browser.see(&format!("{CARD} > header [data-leader]"), "Leader").await;
    browser.see("[data-pipeline=orders] > header [data-badge]", "Streaming").await;
    let picture = std::env::var("OUTBOXD_TEST_PICTURE").ok();
    // A picture has a minute of load in it.
    let rounds = if picture.is_some() { 600 } else { 20 };
    for round in 0..rounds {
        let many = 4 + (10.0 * (1.3 + (f64::from(round) / 45.0).sin() + (f64::from(round) / 8.0).sin() / 4.0)) as usize;
        add(&one, 0, many).await;
        add(&other, 0, many / 3 + 1).await;
        if round % 200 == 10 {
            other.execute(POISON).await;
        }
        if picture.is_some() {
            tokio::time::sleep(std::time::Duration::from_millis(90)).await;
        }
    }
    browser.see(&of_publisher("search", "[data-badge]"), "Sink away").await;
    browser.see(&of_publisher("partners", "[data-dead-letters]"), if picture.is_some() { "3" } else { "1" }).await;
    browser.see("[data-pipelines]", "1 of 2 well").await;
    browser.click(&format!("{CARD} [data-letters] summary")).await;
    browser.see(&format!("{CARD} [data-letters]"), "customer-17").await;
    assert_eq!(browser.barriers().await, Vec::<serde_json::Value>::new());
    if let Some(path) = picture {
        browser.picture(&path).await;
    }
    relay.stop().await;
}
