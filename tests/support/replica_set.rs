//! A MongoDB replica set of one's own, to stop and to break.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mongodb::bson::{Bson, Document, Timestamp, doc};
use mongodb::options::{ClientOptions, Hint, WriteConcern};
use mongodb::{Client, Collection};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{PATIENCE, eventually, free_port, tail, variable};

const SET: &str = "rs0";

/// Nobody need log in. Members are numbered from 0. Killed, and their folder removed, when dropped.
pub struct PrivateMongo {
    folder: tempfile::TempDir,
    /// No replica set at all.
    lone: bool,
    options: Vec<String>,
    members: Vec<Member>,
}

struct Member {
    port: u16,
    /// To this member alone, whatever its state.
    client: Client,
    child: Option<Child>,
    frozen: bool,
}

impl PrivateMongo {
    /// Options with which [`Self::forget_history`] works: a log of 1 MB. Of the log, what is older than the last
    /// checkpoint is cut off, hence one each second.
    pub const FORGETFUL: &[&str] = &["--oplogSize=1", "--syncdelay=1"];

    /// Options are those of mongod's command line. Ready when it has a primary and all others follow it.
    pub async fn start(members: usize, options: &[&str]) -> Self {
        let folder = tempfile::Builder::new().prefix("outboxd-mo-").tempdir_in("/tmp").expect("a folder for the data");
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        let mut set = PrivateMongo { folder, lone: false, options, members: Vec::new() };
        for _ in 0..members {
            set.add().await;
        }
        for number in 0..members {
            set.until_answers(number).await;
        }
        let configured: Vec<_> = (0..members)
            .map(|number| doc! { "_id": number as i32, "host": format!("127.0.0.1:{}", set.members[number].port) })
            .collect();
        // A primary is missed soon, yet not on a machine that is merely busy; and a new one does not wait long for what
        // a frozen one may know.
        let settings = doc! {
            "electionTimeoutMillis": 2000,
            "heartbeatIntervalMillis": 500,
            "heartbeatTimeoutSecs": 2,
            "catchUpTimeoutMillis": 2000,
        };
        let set_up = doc! { "replSetInitiate": { "_id": SET, "members": configured, "settings": settings } };
        let made = set.members[0].client.database("admin").run_command(set_up).await;
        made.unwrap_or_else(|error| panic!("the set is made: {error}\n{}", tail(&set.log(0))));
        set.until_settled().await;
        set
    }

    /// One server that is no member of a replica set.
    pub async fn lone() -> Self {
        let folder = tempfile::Builder::new().prefix("outboxd-mo-").tempdir_in("/tmp").expect("a folder for the data");
        let mut server = PrivateMongo { folder, lone: true, options: Vec::new(), members: Vec::new() };
        server.add().await;
        server.until_answers(0).await;
        server
    }

    async fn add(&mut self) {
        let (number, port) = (self.members.len(), free_port());
        self.members.push(Member { port, client: alone(port).await, child: None, frozen: false });
        std::fs::create_dir(self.data(number)).expect("a folder for the data");
        self.spawn(number);
    }

    /// Of all members, without a database.
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.members.iter().map(|member| format!("127.0.0.1:{}", member.port)).collect();
        let option = if self.lone { "directConnection=true".to_owned() } else { format!("replicaSet={SET}") };
        format!("mongodb://{}/?{option}", hosts.join(","))
    }

    pub fn port(&self, member: usize) -> u16 {
        self.members[member].port
    }

    /// A connection to this member alone, whatever its state.
    pub fn client(&self, member: usize) -> &Client {
        &self.members[member].client
    }

    fn data(&self, member: usize) -> PathBuf {
        self.folder.path().join(member.to_string())
    }

    fn log(&self, member: usize) -> PathBuf {
        self.folder.path().join(format!("{member}.log"))
    }

    fn spawn(&mut self, member: usize) {
        let log = File::options().create(true).append(true).open(self.log(member)).expect("the log can be written");
        let child = Command::new(variable("OUTBOXD_TEST_MONGOD"))
            .args((!self.lone).then(|| format!("--replSet={SET}")))
            .arg(format!("--dbpath={}", self.data(member).display()))
            .arg(format!("--port={}", self.members[member].port))
            .args(["--bind_ip=127.0.0.1", "--nounixsocket", "--wiredTigerCacheSizeGB=0.25", "--quiet"])
            .args(&self.options)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log can be written"))
            .stderr(log)
            .spawn()
            .expect("mongod starts");
        self.members[member].child = Some(child);
    }

    /// Asks one member, in the database `admin`; `None` when that fails, or takes too long.
    async fn ask(&self, member: usize, question: Document) -> Option<Document> {
        let admin = self.members[member].client.database("admin");
        tokio::time::timeout(Duration::from_secs(5), admin.run_command(question)).await.ok()?.ok()
    }

    async fn until_answers(&mut self, member: usize) {
        eventually(PATIENCE, "mongod answers", async || {
            let ended = self.members[member].child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "mongod ended: {}", tail(&self.log(member)));
            self.ask(member, doc! { "ping": 1 }).await
        })
        .await;
    }

    /// Waits until there is a primary that all other members follow, but for those that are stopped or frozen.
    pub async fn until_settled(&self) {
        let awake = self.awake();
        eventually(PATIENCE, "all members are of use", async || {
            let status = self.ask(self.find_primary().await?, doc! { "replSetGetStatus": 1 }).await?;
            let members = status.get_array("members").ok()?;
            let state = |member: &Bson| member.as_document().and_then(|member| member.get_i32("state").ok());
            let (primary, secondary) = (Some(1), Some(2));
            let of_use = |number: &usize| [primary, secondary].contains(&state(&members[*number]));
            awake.iter().all(of_use).then_some(())
        })
        .await;
    }

    fn awake(&self) -> Vec<usize> {
        let members = self.members.iter().enumerate();
        members.filter(|(_, member)| member.child.is_some() && !member.frozen).map(|(number, _)| number).collect()
    }

    /// The primary, which is none of the frozen members. Waits until there is one.
    pub async fn primary(&self) -> usize {
        eventually(PATIENCE, "there is a primary", async || self.find_primary().await).await
    }

    /// A member that was frozen may believe for a moment that it is still the primary; the one elected last is.
    async fn find_primary(&self) -> Option<usize> {
        let asked = self.awake().into_iter().map(async |number| {
            let hello = self.ask(number, doc! { "hello": 1 }).await?;
            let elected = hello.get_object_id("electionId").ok()?;
            hello.get_bool("isWritablePrimary").ok()?.then_some((elected, number))
        });
        let answers = futures_util::future::join_all(asked).await;
        answers.into_iter().flatten().max().map(|(_, number)| number)
    }

    /// Makes the primary give way, and returns the next one. A set of one elects the same member again.
    pub async fn step_down(&self) -> usize {
        let (old, alone) = (self.primary().await, self.awake().len() == 1);
        let (seconds, catch_up) = if alone { (1, 0) } else { (60, 30) };
        let command = doc! { "replSetStepDown": seconds, "secondaryCatchUpPeriodSecs": catch_up, "force": alone };
        let stepping = self.members[old].client.database("admin").run_command(command).await;
        stepping.unwrap_or_else(|error| panic!("the primary steps down: {error}"));
        let new = eventually(PATIENCE, "there is another primary", async || {
            self.find_primary().await.filter(|new| alone || *new != old)
        });
        let new = new.await;
        // The old one may be elected again.
        self.ask(old, doc! { "replSetFreeze": 0 }).await;
        new
    }

    /// Starts a member again, on the same port, and waits until it serves. It may still be behind the primary.
    pub async fn resume(&mut self, member: usize) {
        self.spawn(member);
        self.until_answers(member).await;
        eventually(PATIENCE, "the member serves", async || {
            let hello = self.ask(member, doc! { "hello": 1 }).await?;
            let is = |name: &str| hello.get_bool(name).unwrap_or_default();
            (is("isWritablePrimary") || is("secondary")).then_some(())
        })
        .await;
    }

    /// A clean shutdown of a member; a primary steps down first.
    pub async fn stop(&mut self, member: usize) {
        self.end(member, Signal::SIGTERM).await;
    }

    /// As after a crash.
    pub async fn kill(&mut self, member: usize) {
        self.end(member, Signal::SIGKILL).await;
    }

    async fn end(&mut self, member: usize, signal: Signal) {
        let Some(mut child) = self.members[member].child.take() else { return };
        self.members[member].frozen = false;
        kill(Pid::from_raw(child.id() as i32), signal).expect("mongod is there to be signalled");
        eventually(PATIENCE, "mongod is gone", async || child.try_wait().ok().flatten()).await;
    }

    /// The member's process stands still; its connections stay open.
    pub fn freeze(&mut self, member: usize) {
        self.signal(member, Signal::SIGSTOP);
        self.members[member].frozen = true;
    }

    pub fn thaw(&mut self, member: usize) {
        self.signal(member, Signal::SIGCONT);
        self.members[member].frozen = false;
    }

    fn signal(&self, member: usize, signal: Signal) {
        let child = self.members[member].child.as_ref().expect("the member runs");
        kill(Pid::from_raw(child.id() as i32), signal).expect("mongod is there to be signalled");
    }

    /// Makes all members that are neither stopped nor frozen cut off their logs up to now, by writing to the database
    /// `filler`: a change stream cannot go on from where it is, nor from any earlier place. The set must have been
    /// started with [`Self::FORGETFUL`].
    pub async fn forget_history(&self) {
        assert!(
            self.options.iter().any(|option| option == Self::FORGETFUL[0]),
            "such a log is never cut off in a test"
        );
        let primary = self.primary().await;
        let hello = self.ask(primary, doc! { "hello": 1 }).await.expect("the primary answers");
        let last = hello.get_document("lastWrite").and_then(|last| last.get_document("opTime"));
        let now = last.and_then(|last| last.get_timestamp("ts")).expect("the log has an end");
        // All of them, or one that is slower would not find in the others' logs what it has not read yet.
        let concern = WriteConcern::builder().w(Some((self.awake().len() as u32).into())).build();
        let filler: Collection<Document> = self.members[primary].client.database("filler").collection("filler");
        eventually(PATIENCE, "the history is forgotten", async || {
            for _ in 0..4 {
                let write = filler.insert_one(doc! { "text": "x".repeat(256 << 10) });
                write.write_concern(concern.clone()).await.expect("the log grows");
            }
            for member in self.awake() {
                if self.oldest(member).await <= now {
                    return None;
                }
            }
            Some(())
        })
        .await;
    }

    /// The time of the oldest entry that a member's log still has.
    async fn oldest(&self, member: usize) -> Timestamp {
        let log: Collection<Document> = self.members[member].client.database("local").collection("oplog.rs");
        let found = log.find_one(doc! {}).hint(Hint::Keys(doc! { "$natural": 1 })).await.expect("the log is read");
        found.and_then(|entry| entry.get_timestamp("ts").ok()).expect("the log has a beginning")
    }
}

impl Drop for PrivateMongo {
    fn drop(&mut self) {
        for member in &mut self.members {
            if let Some(mut child) = member.child.take() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

async fn alone(port: u16) -> Client {
    let url = format!("mongodb://127.0.0.1:{port}/?directConnection=true&serverSelectionTimeoutMS=2000");
    let options = ClientOptions::parse(&url).await.expect("an address of this machine");
    Client::with_options(options).expect("a client for one member")
}
