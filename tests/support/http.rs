//! An HTTP server that answers as it is told to: well, badly, late, in halves, or not at all.
//!
//! It speaks just enough HTTP/1.1 to be told apart from a real one by nobody but a test: a server library would not close
//! a connection in the middle of an answer.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::{PATIENCE, eventually};

#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub at: Instant,
    /// Which connection it came by.
    pub connection: usize,
    pub answer: Answer,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(&self.body)))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Status(u16),
    /// With a header.
    With(u16, &'static str, String),
    /// Nothing, for ever.
    Silence,
    /// Half of an answer, then the end.
    Half,
    /// The end.
    Close,
}

type Script = dyn Fn(&Request) -> Answer + Send + Sync;

pub struct HttpServer {
    pub address: String,
    scheme: &'static str,
    requests: Arc<Mutex<Vec<Request>>>,
    task: JoinHandle<()>,
}

impl HttpServer {
    /// Answers each request as the script says.
    pub async fn start(script: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        Self::listen("http", None, script).await
    }

    /// Takes the connections of a listener that was there before.
    pub fn start_on(listener: TcpListener, script: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        Self::serve_on(listener, "http", None, script)
    }

    /// With TLS.
    pub async fn start_tls(acceptor: TlsAcceptor, script: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        Self::listen("https", Some(acceptor), script).await
    }

    async fn listen(
        scheme: &'static str,
        acceptor: Option<TlsAcceptor>,
        script: impl Fn(&Request) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        Self::serve_on(listener, scheme, acceptor, script)
    }

    fn serve_on(
        listener: TcpListener,
        scheme: &'static str,
        acceptor: Option<TlsAcceptor>,
        script: impl Fn(&Request) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().expect("it has an address").to_string();
        let requests = Arc::<Mutex<Vec<Request>>>::default();
        let (kept, script): (_, Arc<Script>) = (requests.clone(), Arc::new(script));
        let task = tokio::spawn(async move {
            for connection in 0.. {
                let Ok((stream, _)) = listener.accept().await else { return };
                let (kept, script, acceptor) = (kept.clone(), script.clone(), acceptor.clone());
                tokio::spawn(async move {
                    match acceptor {
                        None => serve(stream, connection, &kept, &script).await,
                        Some(acceptor) => match acceptor.accept(stream).await {
                            Ok(stream) => serve(stream, connection, &kept, &script).await,
                            Err(_) => None,
                        },
                    }
                });
            }
        });
        HttpServer { address, scheme, requests, task }
    }

    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("nobody panicked").clone()
    }

    /// Requests that were answered with success.
    pub fn taken(&self) -> Vec<Request> {
        self.requests().into_iter().filter(|request| matches!(request.answer, Answer::Status(200..=299))).collect()
    }

    pub async fn until(&self, what: &str, enough: impl Fn(&[Request]) -> bool) -> Vec<Request> {
        self.until_within(PATIENCE, what, enough).await
    }

    pub async fn until_within(
        &self,
        within: Duration,
        what: &str,
        enough: impl Fn(&[Request]) -> bool,
    ) -> Vec<Request> {
        eventually(within, what, async || Some(self.requests()).filter(|requests| enough(requests))).await
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves one connection until it ends.
async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    connection: usize,
    kept: &Mutex<Vec<Request>>,
    script: &Arc<Script>,
) -> Option<()> {
    let mut buffer = Vec::new();
    loop {
        let head = loop {
            if let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            if stream.read_buf(&mut buffer).await.ok()? == 0 {
                return None;
            }
        };
        let text = String::from_utf8_lossy(&buffer[..head]).into_owned();
        let mut lines = text.lines();
        let path = lines.next()?.split(' ').nth(1)?.to_owned();
        let headers: Vec<_> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let length =
            headers.iter().find(|(name, _)| name == "content-length").and_then(|(_, value)| value.parse().ok());
        let end = head + length.unwrap_or(0);
        while buffer.len() < end {
            if stream.read_buf(&mut buffer).await.ok()? == 0 {
                return None;
            }
        }
        let body = buffer[head..end].to_vec();
        buffer.drain(..end);
        let mut request = Request { path, headers, body, at: Instant::now(), connection, answer: Answer::Close };
        request.answer = script(&request);
        let answer = request.answer.clone();
        kept.lock().expect("nobody panicked").push(request);
        let (status, header) = match answer {
            Answer::Status(status) => (status, String::new()),
            Answer::With(status, name, value) => (status, format!("{name}: {value}\r\n")),
            Answer::Silence => {
                std::future::pending::<()>().await;
                return None;
            }
            Answer::Half => {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{\"ok\":").await.ok()?;
                stream.shutdown().await.ok()?;
                return None;
            }
            Answer::Close => return None,
        };
        let answer = format!("HTTP/1.1 {status} Told\r\n{header}Content-Length: 2\r\n\r\n{{}}");
        stream.write_all(answer.as_bytes()).await.ok()?;
    }
}

/// With the certificate that the test servers share.
pub fn tls_acceptor(folder: &str) -> TlsAcceptor {
    acceptor(folder, b"http/1.1")
}

fn acceptor(folder: &str, protocol: &[u8]) -> TlsAcceptor {
    let chain = CertificateDer::pem_file_iter(format!("{folder}/server.pem")).expect("a certificate is read");
    let chain = chain.collect::<Result<Vec<_>, _>>().expect("a certificate is read");
    let key = PrivateKeyDer::from_pem_file(format!("{folder}/server.key")).expect("a key is read");
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("TLS has versions")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("key and certificate belong together");
    config.alpn_protocols = vec![protocol.to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

/// A server that speaks HTTP/2 and nothing else; gives each request's connection, path and body, and takes them all.
pub async fn http2_server(folder: &str) -> (String, mpsc::UnboundedReceiver<(usize, String, Vec<u8>)>) {
    let acceptor = acceptor(folder, b"h2");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("it has an address");
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        for connection in 0.. {
            let Ok((stream, _)) = listener.accept().await else { return };
            let Ok(stream) = acceptor.accept(stream).await else { continue };
            let sender = sender.clone();
            tokio::spawn(async move {
                let mut requests = h2::server::handshake(stream).await.ok()?;
                while let Some(Ok((request, mut respond))) = requests.accept().await {
                    let sender = sender.clone();
                    tokio::spawn(async move {
                        let (head, mut stream) = request.into_parts();
                        let mut body = Vec::new();
                        while let Some(Ok(part)) = stream.data().await {
                            stream.flow_control().release_capacity(part.len()).ok()?;
                            body.extend_from_slice(&part);
                        }
                        sender.send((connection, head.uri.path().to_owned(), body)).ok()?;
                        respond.send_response(axum::http::Response::new(()), true).ok()
                    });
                }
                Some(())
            });
        }
    });
    (format!("https://{address}"), receiver)
}
