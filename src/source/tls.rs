//! TLS as the databases' own clients have it: how far a server's certificate is looked at is the user's choice, so the
//! verifier has three grades instead of rustls' one. Files are read anew at every connect: renewed certificates need
//! no restart.

use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use thiserror::Error as ThisError;

/// A file that cannot be used.
#[derive(Debug, ThisError)]
#[error("{what}")]
pub struct TlsTrouble {
    pub what: String,
    pub remedy: String,
}

impl TlsTrouble {
    fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        TlsTrouble { what: what.into(), remedy: remedy.into() }
    }
}

/// A client's own certificate and key, which the parameters name.
pub fn identity(
    certificate: &Path,
    key: &Path,
    (certificate_parameter, key_parameter): (&str, &str),
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsTrouble> {
    let chain = certificates(certificate, certificate_parameter)?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| {
        TlsTrouble::new(
            format!("the key {} cannot be read: {error}", key.display()),
            format!("name in {key_parameter} the certificate's key, in PEM and unencrypted"),
        )
    })?;
    Ok((chain, private))
}

/// Authorities that are trusted.
pub struct Roots {
    store: RootCertStore,
    /// The same certificates as they came, since a self-signed server certificate is its own root.
    given: Vec<CertificateDer<'static>>,
}

/// The authorities of a PEM file, which `parameter` names.
pub fn file_roots(path: &Path, parameter: &str) -> Result<Roots, TlsTrouble> {
    let given = certificates(path, parameter)?;
    let mut store = RootCertStore::empty();
    if let (0, _) = store.add_parsable_certificates(given.iter().cloned()) {
        return Err(TlsTrouble::new(
            format!("{} holds no certificate that can be a root", path.display()),
            format!("name the file of the authority's certificate in {parameter}"),
        ));
    }
    Ok(Roots { store, given })
}

/// The system's own authorities; `parameter` can name another.
pub fn system_roots(parameter: &str) -> Result<Roots, TlsTrouble> {
    let found = rustls_native_certs::load_native_certs();
    let mut store = RootCertStore::empty();
    if let (0, _) = store.add_parsable_certificates(found.certs) {
        return Err(TlsTrouble::new(
            "this system has no root certificates",
            format!("install the package ca-certificates, or name the authority's certificate in {parameter}"),
        ));
    }
    Ok(Roots { store, given: Vec::new() })
}

pub fn certificates(path: &Path, parameter: &str) -> Result<Vec<CertificateDer<'static>>, TlsTrouble> {
    let unreadable = |error: &dyn std::fmt::Display| {
        TlsTrouble::new(
            format!("the certificate {} cannot be read: {error}", path.display()),
            format!("name a readable PEM file in {parameter}"),
        )
    };
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| unreadable(&error))?;
    if found.is_empty() { Err(unreadable(&"it holds no certificate")) } else { Ok(found) }
}

/// How far a server's certificate is looked at.
pub enum Trust {
    /// Whoever answers. `bound`: SCRAM's channel binding is to make up for it.
    Anything {
        bound: bool,
    },
    Chain(Roots),
    ChainAndName(Roots),
}

pub struct Verifier {
    pub trust: Trust,
    pub provider: Arc<CryptoProvider>,
}

impl std::fmt::Debug for Verifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.trust {
            Trust::Anything { .. } => "Verifier(anything)",
            Trust::Chain(_) => "Verifier(chain)",
            Trust::ChainAndName(_) => "Verifier(chain and name)",
        })
    }
}

impl Verifier {
    fn verify_chain(
        &self,
        roots: &Roots,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        let algorithms = self.provider.signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(leaf)?;
        match verify_server_cert_signed_by_trust_anchor(&parsed, &roots.store, intermediates, now, algorithms) {
            // `openssl req -x509` makes an authority of what is to be a server's certificate. webpki refuses to see it
            // at the end of a chain, after it looked at the dates; OpenSSL takes a certificate that is itself trusted.
            Err(Error::InvalidCertificate(CertificateError::Other(_)))
                if roots.given.iter().any(|root| root == leaf) =>
            {
                Ok(())
            }
            result => result,
        }
    }

    fn signature(&self, result: Result<HandshakeSignatureValid, Error>) -> Result<HandshakeSignatureValid, Error> {
        match (&self.trust, result) {
            // X.509 version 1 and the like, which webpki cannot read and whoever checks nothing must not care about. Only
            // channel binding rests on the signature here.
            (Trust::Anything { bound: false }, Err(Error::InvalidCertificate(reason)))
                if reason != CertificateError::BadSignature =>
            {
                Ok(HandshakeSignatureValid::assertion())
            }
            (_, result) => result,
        }
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match &self.trust {
            Trust::Anything { .. } => {}
            Trust::Chain(roots) => self.verify_chain(roots, leaf, intermediates, now)?,
            Trust::ChainAndName(roots) => {
                self.verify_chain(roots, leaf, intermediates, now)?;
                verify_server_name(&ParsedCertificate::try_from(leaf)?, name)?;
            }
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        self.signature(verify_tls12_signature(message, leaf, signed, algorithms))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        self.signature(verify_tls13_signature(message, leaf, signed, algorithms))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
