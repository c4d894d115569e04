//! A Kafka cluster of one's own, to freeze, to kill and to bring back.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};

use super::{PATIENCE, Proxy, eventually, free_port, tail, variable};

const CLUSTER: &str = "outboxd-test-private-1";
const JVM: [&str; 4] = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+PerfDisableSharedMem"];

/// The first broker is the controller as well; the others can be frozen without it noticing more than their silence.
/// Killed, and its folder removed, when dropped.
pub struct PrivateKafka {
    folder: tempfile::TempDir,
    nodes: Vec<Node>,
    /// Where the first broker listens too, and the port that it tells those who come that way.
    detour: Option<(u16, u16)>,
}

struct Node {
    id: i32,
    port: u16,
    child: Option<Child>,
}

impl PrivateKafka {
    /// Brokers have the ids 1 to `brokers`.
    pub async fn start(brokers: i32) -> Self {
        Self::launch(brokers, None).await
    }

    /// One broker, which can be reached by way of a proxy as well.
    pub async fn start_with_detour() -> (Self, Proxy) {
        let port = free_port();
        let proxy = Proxy::to(&format!("127.0.0.1:{port}")).await;
        (Self::launch(1, Some((port, proxy.port()))).await, proxy)
    }

    async fn launch(brokers: i32, detour: Option<(u16, u16)>) -> Self {
        let folder =
            tempfile::Builder::new().prefix("outboxd-kafka-").tempdir_in("/tmp").expect("a folder for the data");
        let nodes = (1..=brokers).map(|id| Node { id, port: free_port(), child: None }).collect();
        let mut cluster = PrivateKafka { folder, nodes, detour };
        let controller = free_port();
        let mut formatting = Vec::new();
        for node in &cluster.nodes {
            cluster.configure(node, controller);
            let mut command = cluster.java(node);
            let cluster_id = format!("--cluster-id={CLUSTER}");
            command.args(["kafka.tools.StorageTool", "format", &cluster_id, "-c"]).arg(cluster.properties(node));
            formatting.push(tokio::process::Command::from(command).spawn().expect("java runs"));
        }
        for (mut child, node) in formatting.into_iter().zip(&cluster.nodes) {
            let formatted = child.wait().await.expect("the formatting can be waited for");
            assert!(formatted.success(), "the storage is not formatted: {}", tail(&cluster.log(node)));
        }
        for id in 1..=brokers {
            cluster.spawn(id);
        }
        cluster.until_ready().await;
        cluster
    }

    /// The addresses of all brokers.
    pub fn brokers(&self) -> String {
        let addresses: Vec<_> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        addresses.join(",")
    }

    fn configure(&self, node: &Node, controller: u16) {
        let (id, port) = (node.id, node.port);
        let data = self.folder.path().join(format!("data-{id}"));
        let (roles, listeners) = match id {
            1 => ("broker,controller", format!("PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}")),
            _ => ("broker", format!("PLAINTEXT://127.0.0.1:{port}")),
        };
        let (listeners, detour) = match self.detour {
            Some((listens, told)) => {
                (format!("{listeners},DETOUR://127.0.0.1:{listens}"), format!(",DETOUR://127.0.0.1:{told}"))
            }
            None => (listeners, String::new()),
        };
        let properties = format!(
            "process.roles={roles}\n\
             node.id={id}\n\
             controller.quorum.voters=1@127.0.0.1:{controller}\n\
             controller.listener.names=CONTROLLER\n\
             inter.broker.listener.name=PLAINTEXT\n\
             listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,DETOUR:PLAINTEXT\n\
             listeners={listeners}\n\
             advertised.listeners=PLAINTEXT://127.0.0.1:{port}{detour}\n\
             log.dirs={}\n\
             auto.create.topics.enable=false\n\
             offsets.topic.replication.factor=1\n\
             offsets.topic.num.partitions=1\n\
             transaction.state.log.replication.factor=1\n\
             transaction.state.log.min.isr=1\n\
             transaction.state.log.num.partitions=1\n\
             num.network.threads=2\n\
             num.io.threads=2\n\
             log.cleaner.dedupe.buffer.size=8388608\n",
            data.display()
        );
        std::fs::write(self.properties(node), properties).expect("the configuration is written");
    }

    fn properties(&self, node: &Node) -> PathBuf {
        self.folder.path().join(format!("{}.properties", node.id))
    }

    fn log(&self, node: &Node) -> PathBuf {
        self.folder.path().join(format!("{}.log", node.id))
    }

    fn java(&self, node: &Node) -> Command {
        let log = File::options().create(true).append(true).open(self.log(node)).expect("the log can be written");
        let mut command = Command::new("java");
        command.args(JVM).arg("-Dorg.slf4j.simpleLogger.showDateTime=true");
        command.arg("-cp").arg(format!("{}/*", variable("OUTBOXD_TEST_KAFKA_LIBS")));
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("the log has two writers")).stderr(log);
        command.current_dir(self.folder.path());
        command
    }

    fn spawn(&mut self, id: i32) {
        let node = self.node(id);
        let mut command = self.java(node);
        let child = command.arg("kafka.Kafka").arg(self.properties(node)).spawn().expect("java runs");
        self.nodes[id as usize - 1].child = Some(child);
    }

    fn node(&self, id: i32) -> &Node {
        &self.nodes[id as usize - 1]
    }

    /// Waits until each broker knows of all.
    pub async fn until_ready(&mut self) {
        for index in 0..self.nodes.len() {
            let log = self.log(&self.nodes[index]);
            let address = format!("127.0.0.1:{}", self.nodes[index].port);
            eventually(PATIENCE, "the private Kafka answers", async || {
                let ended = self.nodes[index].child.as_mut().and_then(|child| child.try_wait().ok().flatten());
                assert!(ended.is_none(), "a private broker ended: {}", tail(&log));
                // A client made anew, for one that was refused waits before it tries again.
                let asked = address.clone();
                let known = tokio::task::spawn_blocking(move || brokers_known_at(&asked)).await.ok()?;
                (known == self.nodes.len()).then_some(())
            })
            .await;
        }
    }

    fn signal(&self, id: i32, signal: Signal) {
        let child = self.node(id).child.as_ref().expect("the broker runs");
        kill(Pid::from_raw(child.id() as i32), signal).expect("the broker is there to be signalled");
    }

    /// It keeps its connections and answers nothing.
    pub fn freeze(&self, id: i32) {
        self.signal(id, Signal::SIGSTOP);
    }

    pub fn thaw(&self, id: i32) {
        self.signal(id, Signal::SIGCONT);
    }

    /// As a crash does.
    pub fn kill(&mut self, id: i32) {
        if let Some(mut child) = self.nodes[id as usize - 1].child.take() {
            child.kill().expect("the broker is killed");
            child.wait().expect("the broker can be waited for");
        }
    }

    /// Starts a killed broker again, with its data, on its port.
    pub async fn restart(&mut self, id: i32) {
        self.spawn(id);
        self.until_ready().await;
    }
}

impl Drop for PrivateKafka {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            if let Some(child) = &mut node.child {
                // Kills a frozen one as well.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        if std::thread::panicking() {
            for node in &self.nodes {
                println!("the end of the log of private broker {}:\n{}", node.id, tail(&self.log(node)));
            }
        }
    }
}

fn brokers_known_at(address: &str) -> usize {
    let probe: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", address)
        .set_log_level(rdkafka::config::RDKafkaLogLevel::Emerg)
        .create()
        .expect("a client is made");
    probe.fetch_metadata(None, Duration::from_secs(2)).map_or(0, |metadata| metadata.brokers().len())
}
