//! A database of its own on the shared MySQL or MariaDB server, or on a private one.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outboxd::source::mysql::conninfo::ConnInfo;
use outboxd::source::mysql::session::{Row, Session};
use tokio::sync::Mutex;

use super::{PATIENCE, eventually, free_port, tail, unique, variable};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MySqlFlavor {
    MySql,
    MariaDb,
}

impl MySqlFlavor {
    /// The shared server, without a database.
    pub fn url(self) -> String {
        match self {
            MySqlFlavor::MySql => variable("OUTBOXD_TEST_MYSQL_URL"),
            MySqlFlavor::MariaDb => variable("OUTBOXD_TEST_MARIADB_URL"),
        }
    }

    fn scheme(self) -> &'static str {
        match self {
            MySqlFlavor::MySql => "mysql",
            MySqlFlavor::MariaDb => "mariadb",
        }
    }
}

/// Opens a session, or says why there is none.
pub async fn mysql_session(url: &str) -> Session {
    let info = ConnInfo::parse(url).unwrap_or_else(|error| panic!("{url}: {error}"));
    Session::connect(&info).await.unwrap_or_else(|error| panic!("{url}: {error}"))
}

/// Dropped at the end.
pub struct MySqlDatabase {
    name: String,
    server_url: String,
    sql: Mutex<Session>,
}

impl MySqlDatabase {
    pub async fn create(flavor: MySqlFlavor) -> Self {
        Self::create_at(&flavor.url()).await
    }

    /// `server_url` ends with the slash after the port.
    pub async fn create_at(server_url: &str) -> Self {
        let name = unique("promise");
        let mut session = mysql_session(server_url).await;
        session.execute(&format!("CREATE DATABASE {name}")).await.expect("a database is created");
        let sql = Mutex::new(mysql_session(&format!("{server_url}{name}")).await);
        MySqlDatabase { name, server_url: server_url.to_owned(), sql }
    }

    /// With a table of the native layout, and the counters that writers take the order of commits from.
    pub async fn with_outbox_at(server_url: &str) -> Self {
        let database = Self::create_at(server_url).await;
        database
            .execute(
                "CREATE TABLE outbox (
                     id CHAR(36) NOT NULL DEFAULT (uuid()) PRIMARY KEY,
                     partition_key VARCHAR(255),
                     payload JSON,
                     seq BIGINT
                 )",
            )
            .await;
        database.execute("CREATE TABLE counters (name VARCHAR(64) PRIMARY KEY, seq BIGINT NOT NULL)").await;
        database
    }

    pub async fn with_outbox(flavor: MySqlFlavor) -> Self {
        Self::with_outbox_at(&flavor.url()).await
    }

    pub fn url(&self) -> String {
        format!("{}{}", self.server_url, self.name)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn flavor(&self) -> MySqlFlavor {
        match self.server_url.starts_with("mariadb:") {
            true => MySqlFlavor::MariaDb,
            false => MySqlFlavor::MySql,
        }
    }

    /// The name that a pipeline takes unless it is given another.
    pub fn pipeline(&self) -> String {
        format!("outboxd_{}", self.name)
    }

    pub async fn connect(&self) -> Session {
        mysql_session(&self.url()).await
    }

    /// Opens the test's own connection again, after the server was away.
    pub async fn reconnect(&self) {
        *self.sql.lock().await = self.connect().await;
    }

    /// Runs one statement.
    pub async fn execute(&self, statement: &str) {
        let ran = self.sql.lock().await.execute(statement).await;
        ran.unwrap_or_else(|error| panic!("{statement}: {error}"));
    }

    pub async fn rows(&self, query: &str) -> Vec<Row> {
        let rows = self.sql.lock().await.query(query).await;
        rows.unwrap_or_else(|error| panic!("{query}: {error}"))
    }

    /// The first column of the first row, as text.
    pub async fn text(&self, query: &str) -> Option<String> {
        self.rows(query).await.first().and_then(|row| row.text(0))
    }

    pub async fn number(&self, query: &str) -> i64 {
        let text = self.text(query).await.unwrap_or_else(|| panic!("{query}: no row"));
        text.parse().unwrap_or_else(|_| panic!("{query}: {text} is not a number"))
    }

    /// Makes the server forget all of its log but the file that it writes to, though a replica may read it.
    pub async fn purge_all_but_the_last(&self) {
        if self.flavor() == MySqlFlavor::MariaDb {
            // Else it purges nothing while no replica is connected.
            self.execute("SET GLOBAL slave_connections_needed_for_purge = 0").await;
        }
        let dumps = "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'";
        eventually(PATIENCE, "no replica reads", async || {
            let dumps = self.rows(dumps).await;
            for row in &dumps {
                let _ = self.connect().await.execute(&format!("KILL {}", row.string(0))).await;
            }
            dumps.is_empty().then_some(())
        })
        .await;
        self.execute("FLUSH BINARY LOGS").await;
        let file = self.rows("SHOW BINARY LOGS").await.last().expect("a log").string(0);
        eventually(PATIENCE, "the log is purged", async || {
            self.execute(&format!("PURGE BINARY LOGS TO '{file}'")).await;
            (self.rows("SHOW BINARY LOGS").await.len() == 1).then_some(())
        })
        .await;
    }

    /// The stored position, as text.
    pub async fn checkpoint(&self) -> Option<String> {
        let pipeline = self.pipeline();
        let exists = "SELECT COUNT(*) FROM information_schema.tables
                      WHERE table_schema = DATABASE() AND table_name = 'outboxd_checkpoint'";
        if self.number(exists).await == 0 {
            return None;
        }
        self.text(&format!("SELECT position FROM outboxd_checkpoint WHERE pipeline = '{pipeline}'")).await
    }
}

impl Drop for MySqlDatabase {
    fn drop(&mut self) {
        let (url, name) = (self.server_url.clone(), self.name.clone());
        // A private server may be gone already.
        let dropping = async move {
            if let Ok(info) = ConnInfo::parse(&url)
                && let Ok(mut session) = Session::connect(&info).await
            {
                let _ = session.execute(&format!("DROP DATABASE {name}")).await;
            }
        };
        let _ = std::thread::spawn(move || {
            if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() {
                let _ = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), dropping).await });
            }
        })
        .join();
    }
}

/// A server of one's own, to stop and to break. Killed, and its folder removed, when dropped.
pub struct PrivateMySql {
    flavor: MySqlFlavor,
    folder: tempfile::TempDir,
    port: u16,
    options: Vec<String>,
    child: Option<Child>,
}

impl PrivateMySql {
    /// Options are those of the server's command line, over the shared server's.
    pub async fn start(flavor: MySqlFlavor, options: &[&str]) -> Self {
        let folder = tempfile::Builder::new().prefix("outboxd-my-").tempdir_in("/tmp").expect("a folder for the data");
        let mut server = PrivateMySql {
            flavor,
            folder,
            port: free_port(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            child: None,
        };
        let initialize = match flavor {
            MySqlFlavor::MySql => "OUTBOXD_TEST_MYSQL_INITIALIZE",
            MySqlFlavor::MariaDb => "OUTBOXD_TEST_MARIADB_INITIALIZE",
        };
        let made = Command::new(variable(initialize)).arg(server.data()).status().expect("a data folder is made");
        assert!(made.success(), "{initialize}");
        server.resume().await;
        server
    }

    /// Without a database.
    pub fn url(&self) -> String {
        format!("{}://root:mysql@127.0.0.1:{}/", self.flavor.scheme(), self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Starts it again, on the same port.
    pub async fn resume(&mut self) {
        let (program, config) = match self.flavor {
            MySqlFlavor::MySql => ("OUTBOXD_TEST_MYSQLD", "mysql.cnf"),
            MySqlFlavor::MariaDb => ("OUTBOXD_TEST_MARIADBD", "mariadb.cnf"),
        };
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/servers/config").join(config);
        let log = File::options().create(true).append(true).open(self.log()).expect("the log can be written");
        // Not /tmp: MariaDB deletes the temporary tables it finds when it starts, another server's too.
        let temporary = self.folder.path().join("tmp");
        std::fs::create_dir_all(&temporary).expect("a folder for temporary tables");
        let child = Command::new(variable(program))
            .arg(format!("--defaults-file={}", config.display()))
            .arg(format!("--datadir={}", self.data().display()))
            .arg(format!("--tmpdir={}", temporary.display()))
            .arg(format!("--port={}", self.port))
            .arg("--bind-address=127.0.0.1")
            .arg(format!("--socket={}", self.folder.path().join("s").display()))
            .args(&self.options)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log can be written"))
            .stderr(log)
            .spawn()
            .expect("the server starts");
        self.child = Some(child);
        let (url, log) = (self.url(), self.log());
        eventually(PATIENCE, "the server answers", async || {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "the server ended: {}", tail(&log));
            Session::connect(&ConnInfo::parse(&url).ok()?).await.ok()
        })
        .await;
    }

    /// Keeps a copy of the stopped server's data, for [`Self::go_back`].
    pub fn keep_copy(&self) {
        self.copy(&self.data(), &self.earlier());
    }

    /// Puts the kept copy in the place of the stopped server's data.
    pub fn go_back(&self) {
        std::fs::remove_dir_all(self.data()).expect("the data can be removed");
        self.copy(&self.earlier(), &self.data());
    }

    fn earlier(&self) -> PathBuf {
        self.folder.path().join("earlier")
    }

    fn copy(&self, from: &Path, to: &Path) {
        assert!(self.child.is_none(), "only a stopped server's data are of one piece");
        let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().expect("cp runs");
        assert!(copied.success(), "a copy of {}", from.display());
    }

    /// A clean shutdown.
    pub async fn stop(&mut self) {
        self.end(Signal::SIGTERM).await;
    }

    /// As after a crash.
    pub async fn crash(&mut self) {
        self.end(Signal::SIGKILL).await;
    }

    async fn end(&mut self, signal: Signal) {
        let Some(mut child) = self.child.take() else { return };
        kill(Pid::from_raw(child.id() as i32), signal).expect("the server is there to be signalled");
        eventually(PATIENCE, "the server is gone", async || child.try_wait().ok().flatten()).await;
    }
}

impl Drop for PrivateMySql {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
