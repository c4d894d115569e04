//! What a MongoDB server seldom does: it is slow to open a stream, refuses what it served a moment ago, or gives up on an
//! event. It is made to by its own fail points.

use std::io::Read as _;
use std::time::{Duration, Instant};

use mongodb::bson::{Bson, DateTime, Document, doc};
use nix::sys::stat::Mode;

use crate::support::{Documents, PATIENCE, PrivateMongo, ends, eventually, until_log};

const HOST_UNREACHABLE: i32 = 6;
const SNAPSHOT_TOO_OLD: i32 = 239;
const CHANGE_STREAM_FATAL: i32 = 280;
const OBJECT_TOO_LARGE: i32 = 10334;

/// Longer than a lease.
const SLOW: Duration = Duration::from_secs(9);

/// A server that fails relays when it is told to, and nobody else.
struct Faulty {
    _server: PrivateMongo,
    documents: Documents,
}

impl Faulty {
    async fn start() -> Self {
        let server = PrivateMongo::start(1, &["--setParameter=enableTestCommands=1"]).await;
        Faulty { documents: Documents::at(&server.url()).await, _server: server }
    }

    async fn configure(&self, mode: Bson, data: Document) -> Document {
        let command = doc! { "configureFailPoint": "failCommand", "mode": mode, "data": data };
        self.documents.database.administer(command).await
    }

    /// These commands about the outbox fail: all of them, or as many as said.
    async fn refuse(&self, commands: &[&str], code: i32, times: Option<i32>) {
        let outbox = format!("{}.outbox", self.documents.database.name());
        let data = doc! { "failCommands": commands, "appName": "outboxd", "namespace": outbox, "errorCode": code };
        let mode = times.map_or(Bson::from("alwaysOn"), |times| doc! { "times": times }.into());
        self.configure(mode, data).await;
    }

    /// The next such command takes long.
    async fn slow_down(&self, command: &str) {
        let slow = SLOW.as_millis() as i32;
        let data = doc! {
            "failCommands": [command], "appName": "outboxd", "blockConnection": true, "blockTimeMS": slow,
        };
        self.configure(doc! { "times": 1 }.into(), data).await;
    }

    async fn mend(&self) {
        self.configure("off".into(), doc! {}).await;
    }

    async fn lease(&self) -> Option<Lease> {
        let checkpoint = self.documents.database.checkpoint().await?;
        let lease = checkpoint.get_document("lease").ok()?;
        Some(Lease { epoch: lease.get_i64("epoch").ok()?, until: *lease.get_datetime("until").ok()? })
    }

    async fn until_leased(&self) -> Lease {
        eventually(PATIENCE, "there is a lease", async || self.lease().await).await
    }
}

#[derive(Debug)]
struct Lease {
    epoch: i64,
    until: DateTime,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_slow_to_open_does_not_cost_the_lease() {
    let mut faulty = Faulty::start().await;
    faulty.slow_down("aggregate").await;
    let begin = Instant::now();
    let mut leader = faulty.documents.start(&[]);
    let taken = faulty.until_leased().await;
    let mut standby = faulty.documents.start(&[]);
    standby.until_state("standing-by").await;
    until_log(&mut leader, "reading the change stream").await;
    assert!(begin.elapsed() > SLOW, "it was not slow: {:?}", begin.elapsed());
    let lease = faulty.until_leased().await;
    assert_eq!(lease.epoch, taken.epoch, "nobody else took it meanwhile");
    assert_eq!(standby.status().await["state"], "standing-by");
    faulty.documents.add(1).await;
    faulty.documents.reader.arrive(&[1]).await;
    leader.stop().await;
    standby.until_state("streaming").await;
    standby.stop().await;
}

/// The file that is written beside the checkpoint is a pipe that nobody reads.
#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_is_slow_to_be_stored_does_not_cost_the_lease() {
    let mut faulty = Faulty::start().await;
    let folder = tempfile::tempdir().expect("a folder");
    let (file, beside) = (folder.path().join("checkpoint"), folder.path().join("checkpoint.new"));
    let place = format!("file:{}", file.display());
    let name = faulty.documents.database.pipeline();
    let flags = ["--checkpoint", &place, "--checkpoint-interval", "50ms", "--name", &name];
    let mut relay = faulty.documents.reading(&flags).await;
    nix::unistd::mkfifo(&beside, Mode::S_IRWXU).expect("a pipe");
    faulty.documents.add(1).await;
    faulty.documents.reader.arrive(&[1]).await;
    let before = faulty.until_leased().await;
    let renewed = before.until.timestamp_millis() + SLOW.as_millis() as i64;
    let after = eventually(PATIENCE, "the lease is renewed all the while", async || {
        faulty.lease().await.filter(|lease| lease.until.timestamp_millis() > renewed)
    })
    .await;
    assert_eq!(after.epoch, before.epoch, "it was never lost");
    assert!(relay.is_running() && !relay.log().contains("lease"), "{}", relay.log());
    // It was waiting to be stored indeed.
    let waiting = tokio::task::spawn_blocking(move || {
        let mut pipe = std::fs::File::open(&beside).expect("the pipe is opened");
        std::fs::remove_file(&beside).expect("the pipe is removed");
        let mut text = String::new();
        pipe.read_to_string(&mut text).expect("the pipe is read");
        text
    });
    let waiting = tokio::time::timeout(PATIENCE, waiting).await.expect("something is stored").expect("it is read");
    assert!(waiting.contains("\"position\""), "{waiting}");
    faulty.documents.add(2).await;
    faulty.documents.reader.arrive_at_least_once(&[2], &[1]).await;
    relay.stop().await;
}

#[tokio::test]
async fn a_snapshot_that_outlived_the_servers_past_ends_with_exit_3_and_is_redone() {
    let mut faulty = Faulty::start().await;
    for number in 1..4 {
        faulty.documents.add(number).await;
    }
    faulty.refuse(&["find"], SNAPSHOT_TOO_OLD, Some(1)).await;
    let relay = faulty.documents.start(&["--snapshot", "existing"]);
    ends(relay, 3, &["SnapshotTooOld", "minSnapshotHistoryWindowInSeconds"]).await;
    faulty.documents.until_snapshot_is("pending").await;
    faulty.documents.add(4).await;
    let relay = faulty.documents.start(&[]);
    faulty.documents.reader.arrive_at_least_once(&[1, 2, 3, 4], &[]).await;
    faulty.documents.until_snapshot_is("done").await;
    relay.stop().await;
}

#[tokio::test]
async fn a_stream_that_breaks_is_opened_again_where_it_was() {
    let mut faulty = Faulty::start().await;
    let relay = faulty.documents.reading(&[]).await;
    faulty.refuse(&["aggregate", "getMore"], HOST_UNREACHABLE, Some(5)).await;
    faulty.documents.add(1).await;
    faulty.documents.reader.arrive(&[1]).await;
    let log = relay.log();
    // Some attempts the driver makes again by itself.
    assert!(log.matches("the change stream is opened again").count() > 1, "{log}");
    assert!(!log.contains("retry_in_ms"), "nothing begins anew: {log}");
    relay.stop().await;
    faulty.documents.reader.nothing_more().await;
}

#[tokio::test]
async fn a_stream_that_stays_broken_is_shown_as_trouble_and_begun_anew() {
    let mut faulty = Faulty::start().await;
    let mut relay = faulty.documents.reading(&[]).await;
    let begin = Instant::now();
    faulty.refuse(&["aggregate", "getMore"], HOST_UNREACHABLE, None).await;
    faulty.documents.add(1).await;
    until_log(&mut relay, "retry_in_ms").await;
    assert!(begin.elapsed() > Duration::from_secs(14), "too soon: {:?}", begin.elapsed());
    let status = relay.status().await;
    assert!(status["last_error"].as_str().is_some_and(|error| error.contains("HostUnreachable")), "{status}");
    assert_ne!(status["state"], "streaming");
    assert!(!relay.log().contains("lease"), "the lease was kept: {}", relay.log());
    faulty.mend().await;
    faulty.documents.reader.arrive(&[1]).await;
    relay.until_state("streaming").await;
    relay.stop().await;
    faulty.documents.reader.nothing_more().await;
}

#[tokio::test]
async fn an_event_that_the_server_cannot_send_halts_and_nothing_is_skipped() {
    let mut faulty = Faulty::start().await;
    let relay = faulty.documents.reading(&[]).await;
    faulty.documents.add(1).await;
    faulty.documents.reader.arrive(&[1]).await;
    faulty.refuse(&["getMore"], OBJECT_TOO_LARGE, Some(1)).await;
    ends(relay, 6, &["an event is too large for the server to send", "nothing was skipped", "6.0.9"]).await;
    faulty.documents.add(2).await;
    let relay = faulty.documents.start(&[]);
    faulty.documents.reader.arrive(&[2]).await;
    relay.stop().await;
}

#[tokio::test]
async fn a_stream_that_the_server_gives_up_for_good_is_a_lost_position() {
    let mut faulty = Faulty::start().await;
    let relay = faulty.documents.reading(&[]).await;
    faulty.documents.add(1).await;
    faulty.documents.reader.arrive(&[1]).await;
    faulty.refuse(&["getMore"], CHANGE_STREAM_FATAL, Some(1)).await;
    ends(relay, 4, &["is lost", "the oplog begins:", "ChangeStreamFatalError", "--start"]).await;
    faulty.documents.add(2).await;
    // The position is kept, for a person to decide.
    let relay = faulty.documents.start(&[]);
    faulty.documents.reader.arrive(&[2]).await;
    relay.stop().await;
}
