//! What tokio-postgres and SCRAM want to know of a transport. Both kinds of connections run over the one type, so each
//! is opened, encrypted and watched in the same way; tokio-postgres is handed the finished transport.

use std::convert::Infallible;
use std::future::{Ready, ready};

use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

use super::tls::end_point_hash;
use crate::source::transport::Transport;

/// What SCRAM can be bound to.
pub(super) fn end_point_hash_of(transport: &Transport) -> Option<Vec<u8>> {
    transport.peer_certificate().and_then(end_point_hash)
}

impl TlsStream for Transport {
    fn channel_binding(&self) -> ChannelBinding {
        end_point_hash_of(self).map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}

/// Tells tokio-postgres that the handshake is over: it asks for TLS on a transport that has it.
pub(super) struct Encrypted;

impl TlsConnect<Transport> for Encrypted {
    type Stream = Transport;
    type Error = Infallible;
    type Future = Ready<Result<Transport, Infallible>>;

    fn connect(self, transport: Transport) -> Self::Future {
        ready(Ok(transport))
    }
}
