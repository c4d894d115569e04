//! A stretch of network of one's own, with everything that goes wrong on one.

use std::future::pending;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// What becomes of what is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Nothing comes through any more, in either direction, and nobody is told: connections stay open, and new ones are
    /// accepted. One that was silent once stays so.
    Silence,
    /// What the server sends is swallowed; what is sent to it arrives.
    HalfOpen,
    /// Connections are closed, and new ones at once.
    Cut,
    /// After so many bytes from the server a connection is reset, wherever in a message that is.
    Reset(usize),
    /// Every byte in a packet of its own.
    Drip,
    /// Everything arrives later.
    Latency(Duration),
    /// So many bytes a second come from the server, as if whoever reads them were slow.
    Slow(usize),
}

/// Forwards connections to a server until it is dropped.
pub struct Proxy {
    port: u16,
    weather: watch::Sender<Weather>,
    task: JoinHandle<()>,
}

#[derive(Clone, Copy)]
struct Weather {
    fault: Fault,
    /// How often it changed.
    changes: u32,
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
        let (weather, seen) = watch::channel(Weather { fault: Fault::None, changes: 0, silences: 0 });
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

    pub fn set(&self, fault: Fault) {
        self.weather.send_modify(|weather| {
            *weather = Weather {
                fault,
                changes: weather.changes + 1,
                silences: weather.silences + u32::from(fault == Fault::Silence),
            };
        });
    }

    pub fn fall_silent(&self) {
        self.set(Fault::Silence);
    }

    /// Connections made from now on are forwarded. Silent ones stay so.
    pub fn mend(&self) {
        self.set(Fault::None);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn forward(client: TcpStream, server: String, mut seen: watch::Receiver<Weather>) {
    let accepted = *seen.borrow_and_update();
    match accepted.fault {
        Fault::Silence => return pending().await,
        Fault::Cut => return,
        _ => {}
    }
    // A server that is away refuses; so does the way to it.
    let Ok(server) = TcpStream::connect(&server).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let gone = {
        let seen = seen.clone();
        async {
            tokio::select! {
                () = carry(from_client, to_server, false, seen.clone()) => {}
                () = carry(from_server, to_client, true, seen) => {}
            }
        }
    };
    let ending = async {
        let _ = seen.wait_for(|weather| weather.silences != accepted.silences || weather.fault == Fault::Cut).await;
        let silent = seen.borrow().silences != accepted.silences;
        if silent {
            // Both sockets are held, and neither is read.
            pending::<()>().await;
        }
    };
    tokio::select! {
        biased;
        () = ending => {}
        () = gone => {}
    }
}

/// One direction, until it ends.
async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, of_server: bool, mut seen: watch::Receiver<Weather>) {
    let mut buffer = vec![0; 64 * 1024];
    let mut passed = 0;
    let silences = seen.borrow_and_update().silences;
    loop {
        let Ok(count @ 1..) = from.read(&mut buffer).await else { return };
        let weather = *seen.borrow_and_update();
        if weather.silences != silences {
            // What was read in that very moment is swallowed too.
            return pending().await;
        }
        let bytes = &buffer[..count];
        let sent = match weather.fault {
            Fault::HalfOpen if of_server => Ok(()),
            Fault::Reset(after) if of_server && passed + count >= after => {
                let part = after.saturating_sub(passed).min(count);
                let _ = to.write_all(&bytes[..part]).await;
                // The other half goes with it; nothing that is queued is sent.
                let _ = SockRef::from(to.as_ref()).set_linger(Some(Duration::ZERO));
                return;
            }
            Fault::Drip => drip(&mut to, bytes).await,
            Fault::Latency(delay) => {
                tokio::time::sleep(delay).await;
                to.write_all(bytes).await
            }
            Fault::Slow(rate) if of_server => {
                tokio::time::sleep(Duration::from_secs_f64(count as f64 / rate as f64).min(Duration::from_secs(1)))
                    .await;
                to.write_all(bytes).await
            }
            _ => to.write_all(bytes).await,
        };
        passed += count;
        if sent.is_err() {
            return;
        }
    }
}

async fn drip(to: &mut OwnedWriteHalf, bytes: &[u8]) -> std::io::Result<()> {
    for byte in bytes {
        to.write_all(std::slice::from_ref(byte)).await?;
        tokio::task::yield_now().await;
    }
    Ok(())
}

/// `host:port` of a URL that has both, and a user.
fn authority(url: &str) -> &str {
    let (_, after) = url.split_once('@').expect("the address has a user");
    after.split_once('/').expect("the address has a database").0
}
