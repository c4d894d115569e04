//! The bytes' way to a server: TCP, a Unix socket, or TLS over TCP.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, tcp};
#[cfg(unix)]
use tokio::net::{UnixStream, unix};
use tokio_rustls::client::TlsStream as RustlsStream;

pub enum Transport {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
    Tls(Box<RustlsStream<TcpStream>>),
}

/// The reading half of a transport. Plain sockets are split without a lock.
#[derive(Debug)]
pub enum ReadHalf {
    Tcp(tcp::OwnedReadHalf),
    #[cfg(unix)]
    Unix(unix::OwnedReadHalf),
    Tls(tokio::io::ReadHalf<Box<RustlsStream<TcpStream>>>),
}

/// The writing half of a transport. Over TLS what is written leaves with the flush.
#[derive(Debug)]
pub enum WriteHalf {
    Tcp(tcp::OwnedWriteHalf),
    #[cfg(unix)]
    Unix(unix::OwnedWriteHalf),
    Tls(tokio::io::WriteHalf<Box<RustlsStream<TcpStream>>>),
}

impl Transport {
    pub(super) fn is_encrypted(&self) -> bool {
        matches!(self, Transport::Tls(_))
    }

    /// The certificate that the server has shown, in DER.
    pub(super) fn peer_certificate(&self) -> Option<&[u8]> {
        match self {
            Transport::Tls(stream) => {
                let (_, session) = stream.get_ref();
                session.peer_certificates()?.first().map(AsRef::as_ref)
            }
            _ => None,
        }
    }

    pub(super) fn into_split(self) -> (ReadHalf, WriteHalf) {
        match self {
            Transport::Tcp(stream) => {
                let (reader, writer) = stream.into_split();
                (ReadHalf::Tcp(reader), WriteHalf::Tcp(writer))
            }
            #[cfg(unix)]
            Transport::Unix(stream) => {
                let (reader, writer) = stream.into_split();
                (ReadHalf::Unix(reader), WriteHalf::Unix(writer))
            }
            Transport::Tls(stream) => {
                let (reader, writer) = tokio::io::split(stream);
                (ReadHalf::Tls(reader), WriteHalf::Tls(writer))
            }
        }
    }
}

/// Sets how many bytes make a socket readable. No crate in the tree has a safe call for it.
#[cfg(target_os = "linux")]
fn set_receive_low_water(socket: &TcpStream, bytes: nix::libc::c_int) -> bool {
    use std::os::fd::AsRawFd as _;
    let size = size_of_val(&bytes) as nix::libc::socklen_t;
    let (level, option) = (nix::libc::SOL_SOCKET, nix::libc::SO_RCVLOWAT);
    // SAFETY: the descriptor is open as long as `socket` is borrowed, and the value lives through the call.
    unsafe { nix::libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const bytes).cast(), size) == 0 }
}

impl ReadHalf {
    /// Makes the socket readable only when it holds this many bytes; whether that can be done. Data that trickles in
    /// then wakes nobody: while it is set, read with [`read_now`](Self::read_now) after a pause, never by waiting.
    #[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
    pub(super) fn set_low_water(&self, bytes: i32) -> bool {
        match self {
            #[cfg(target_os = "linux")]
            ReadHalf::Tcp(half) => set_receive_low_water(half.as_ref(), bytes),
            _ => false,
        }
    }

    /// Reads what is there, without waiting and whatever the low-water mark says.
    pub(super) fn read_now(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            ReadHalf::Tcp(half) => io::Read::read(&mut &*socket2::SockRef::from(half.as_ref()), into),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

macro_rules! forward {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Self::Tcp($stream) => $call,
            #[cfg(unix)]
            Self::Unix($stream) => $call,
            Self::Tls($stream) => $call,
        }
    };
}

macro_rules! read_by_forwarding {
    ($($name:ty),+) => {$(
        impl AsyncRead for $name {
            fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
                forward!(self, stream => Pin::new(stream).poll_read(cx, buf))
            }
        }
    )+};
}

macro_rules! write_by_forwarding {
    ($($name:ty),+) => {$(
        impl AsyncWrite for $name {
            fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
                forward!(self, stream => Pin::new(stream).poll_write(cx, buf))
            }

            fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                forward!(self, stream => Pin::new(stream).poll_flush(cx))
            }

            fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                forward!(self, stream => Pin::new(stream).poll_shutdown(cx))
            }
        }
    )+};
}

read_by_forwarding!(Transport, ReadHalf);
write_by_forwarding!(Transport, WriteHalf);
