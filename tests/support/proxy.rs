//! A stretch of network of one's own, to fall silent.

use std::future::pending;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// Forwards connections to a server until it is dropped.
pub struct Proxy {
    port: u16,
    weather: watch::Sender<Weather>,
    task: JoinHandle<()>,
}

#[derive(Clone, Copy)]
struct Weather {
    silent: bool,
    /// How often it fell silent: a connection that was silent once stays so.
    silences: u32,
}

impl Proxy {
    /// In front of the server that this URL names.
    pub async fn before(url: &str) -> Self {
        Self::to(authority(url)).await
    }

    /// In front of whoever will listen at this address, a host and a port.
    pub async fn to(server: &str) -> Self {
        let server = server.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port for the proxy");
        let port = listener.local_addr().expect("a listener has an address").port();
        let (weather, seen) = watch::channel(Weather { silent: false, silences: 0 });
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(forward(client, server.clone(), seen.clone()));
            }
        });
        Proxy { port, weather, task }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of what is behind it, by way of it.
    pub fn url(&self, of: &str) -> String {
        of.replacen(authority(of), &format!("127.0.0.1:{}", self.port), 1)
    }

    /// Nothing comes through any more, in either direction, and nobody is told: connections stay open, and new ones are
    /// accepted.
    pub fn fall_silent(&self) {
        self.weather.send_modify(|weather| *weather = Weather { silent: true, silences: weather.silences + 1 });
    }

    /// Connections made from now on are forwarded. Older ones stay silent.
    pub fn mend(&self) {
        self.weather.send_modify(|weather| weather.silent = false);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn forward(mut client: TcpStream, server: String, mut seen: watch::Receiver<Weather>) {
    let accepted = *seen.borrow();
    if accepted.silent {
        return pending().await;
    }
    let mut server = TcpStream::connect(&server).await.unwrap_or_else(|error| panic!("{server}: {error}"));
    let fell_silent = async { seen.wait_for(|weather| weather.silences != accepted.silences).await.is_ok() };
    tokio::select! {
        biased;
        _ = fell_silent => {}
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => return,
    }
    // Both sockets are held, and neither is read.
    pending::<()>().await;
}

/// `host:port` of a URL that has both, and a user.
fn authority(url: &str) -> &str {
    let (_, after) = url.split_once('@').expect("the address has a user");
    after.split_once('/').expect("the address has a database").0
}
