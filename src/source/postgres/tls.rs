//! TLS as libpq's `sslmode` has it: how far the server's certificate is looked at is the user's choice, so the
//! verifier has three grades instead of rustls' one. Files are read anew at every connect: renewed certificates need
//! no restart.
//!
//! SCRAM can be bound to the session (`tls-server-end-point`, RFC 5929): both sides mix a hash of the server's
//! certificate into the proof, and someone between the two, who must show another certificate, is found out. This is
//! why the handshake's signature is checked even where any certificate will do.

use std::path::Path;
use std::sync::Arc;

use ring::digest;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    SupportedProtocolVersion,
};

use super::conninfo::{ChannelBinding, RootCert, SslMode, SslNegotiation, TlsOptions, TlsVersion};
use super::server_error::WireError;

/// The configuration for one connection attempt.
pub(super) fn client_config(options: &TlsOptions) -> Result<ClientConfig, WireError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = verifier(options, &provider)?;
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions(options)?)
        .map_err(|error| WireError::refused(format!("TLS: {error}"), "widen ssl_min_ and ssl_max_protocol_version"))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match &options.certificate {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates(certificate, "sslcert")?;
            let private = PrivateKeyDer::from_pem_file(key).map_err(|error| {
                WireError::refused(
                    format!("the key {} cannot be read: {error}", key.display()),
                    "name in sslkey the certificate's key, in PEM and unencrypted",
                )
            })?;
            builder.with_client_auth_cert(chain, private).map_err(|error| {
                WireError::refused(
                    format!("the certificate {} and its key cannot be used: {error}", certificate.display()),
                    "name in sslkey the key of the certificate in sslcert",
                )
            })?
        }
    };
    config.enable_sni = options.sni;
    if options.negotiation == SslNegotiation::Direct {
        config.alpn_protocols = vec![b"postgresql".to_vec()];
    }
    Ok(config)
}

fn versions(options: &TlsOptions) -> Result<Vec<&'static SupportedProtocolVersion>, WireError> {
    let old = |version| matches!(version, TlsVersion::V1 | TlsVersion::V1_1);
    if old(options.max_version) {
        return Err(WireError::refused(
            format!("ssl_max_protocol_version={} is older than what outboxd speaks", options.max_version),
            "use TLSv1.2 or TLSv1.3",
        ));
    }
    let mut versions = Vec::new();
    if options.max_version == TlsVersion::V1_3 {
        versions.push(&rustls::version::TLS13);
    }
    if options.min_version != TlsVersion::V1_3 {
        versions.push(&rustls::version::TLS12);
    }
    Ok(versions)
}

fn verifier(options: &TlsOptions, provider: &Arc<CryptoProvider>) -> Result<Verifier, WireError> {
    let roots = match &options.root {
        RootCert::System => Some(system_roots()?),
        RootCert::File(path) if path.exists() => Some(file_roots(path)?),
        RootCert::Default(Some(path)) if path.exists() => Some(file_roots(path)?),
        RootCert::File(path) if matches!(options.mode, SslMode::VerifyCa | SslMode::VerifyFull) => {
            return Err(missing_roots(path));
        }
        RootCert::File(path) => {
            tracing::warn!(
                "sslrootcert {} does not exist; as in libpq, sslmode={} then takes any certificate",
                path.display(),
                options.mode
            );
            None
        }
        RootCert::Default(_) if options.mode == SslMode::VerifyFull => Some(system_roots()?),
        // Anyone can have a certificate of a public authority: without a look at the name it says nothing.
        RootCert::Default(path) if options.mode == SslMode::VerifyCa => {
            return Err(missing_roots(path.as_deref().unwrap_or(Path::new("~/.postgresql/root.crt"))));
        }
        RootCert::Default(_) => None,
    };
    let trust = match roots {
        Some(roots) if options.mode == SslMode::VerifyFull => Trust::ChainAndName(roots),
        // libpq's rule: whoever names roots wants them used, whatever the mode.
        Some(roots) => Trust::Chain(roots),
        None => Trust::Anything { bound: options.channel_binding == ChannelBinding::Require },
    };
    Ok(Verifier { trust, provider: Arc::clone(provider) })
}

fn missing_roots(path: &Path) -> WireError {
    WireError::refused(
        format!("there are no root certificates to check the server with: {} does not exist", path.display()),
        "name the file of the authority's certificate in sslrootcert, or use sslmode=verify-full&sslrootcert=system",
    )
}

struct Roots {
    store: RootCertStore,
    /// The same certificates as they came, since a self-signed server certificate is its own root.
    given: Vec<CertificateDer<'static>>,
}

fn file_roots(path: &Path) -> Result<Roots, WireError> {
    let given = certificates(path, "sslrootcert")?;
    let mut store = RootCertStore::empty();
    if let (0, _) = store.add_parsable_certificates(given.iter().cloned()) {
        return Err(WireError::refused(
            format!("{} holds no certificate that can be a root", path.display()),
            "name the file of the authority's certificate in sslrootcert",
        ));
    }
    Ok(Roots { store, given })
}

fn system_roots() -> Result<Roots, WireError> {
    let found = rustls_native_certs::load_native_certs();
    let mut store = RootCertStore::empty();
    if let (0, _) = store.add_parsable_certificates(found.certs) {
        return Err(WireError::refused(
            "this system has no root certificates",
            "install the package ca-certificates, or name the authority's certificate in sslrootcert",
        ));
    }
    Ok(Roots { store, given: Vec::new() })
}

fn certificates(path: &Path, parameter: &str) -> Result<Vec<CertificateDer<'static>>, WireError> {
    let unreadable = |error: &dyn std::fmt::Display| {
        WireError::refused(
            format!("the certificate {} cannot be read: {error}", path.display()),
            format!("name a readable PEM file in {parameter}"),
        )
    };
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| unreadable(&error))?;
    if found.is_empty() { Err(unreadable(&"it holds no certificate")) } else { Ok(found) }
}

enum Trust {
    /// Whoever answers. `bound`: SCRAM's channel binding is to make up for it.
    Anything {
        bound: bool,
    },
    Chain(Roots),
    ChainAndName(Roots),
}

struct Verifier {
    trust: Trust,
    provider: Arc<CryptoProvider>,
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
            // X.509 version 1 and the like, which webpki cannot read and `sslmode=require` must not care about. Only
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

/// `tls-server-end-point`: the certificate's hash, by the hash function of its signature, but none weaker than
/// SHA-256. None where the signature has no such function (Ed25519).
pub(super) fn end_point_hash(certificate: &[u8]) -> Option<Vec<u8>> {
    let algorithm = match signature_hash(certificate)?.split_last()? {
        (4 | 5, RSA) | (1, ECDSA) | (26, SHA1) => &digest::SHA256, // MD5 and SHA-1
        (11, RSA) | (2, ECDSA_SHA2) | (1, SHA2) => &digest::SHA256,
        (12, RSA) | (3, ECDSA_SHA2) | (2, SHA2) => &digest::SHA384,
        (13, RSA) | (4, ECDSA_SHA2) | (3, SHA2) => &digest::SHA512,
        _ => return None,
    };
    Some(digest::digest(algorithm, certificate).as_ref().to_vec())
}

// Object identifiers in DER without their last number.
const RSA: &[u8] = &[0x2A, 0x86, 0x48, 0x86, 0xF7, 0x0D, 1, 1];
const RSA_PSS: &[u8] = &[0x2A, 0x86, 0x48, 0x86, 0xF7, 0x0D, 1, 1, 10];
const ECDSA: &[u8] = &[0x2A, 0x86, 0x48, 0xCE, 0x3D, 4];
const ECDSA_SHA2: &[u8] = &[0x2A, 0x86, 0x48, 0xCE, 0x3D, 4, 3];
const SHA1: &[u8] = &[0x2B, 14, 3, 2];
const SHA2: &[u8] = &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2];

const SEQUENCE: u8 = 0x30;
const OBJECT_IDENTIFIER: u8 = 0x06;
const FIRST_PARAMETER: u8 = 0xA0;

/// The object identifier that names the signature's hash function.
///
/// ```text
/// Certificate ::= SEQUENCE { tbsCertificate SEQUENCE, signatureAlgorithm SEQUENCE { OID, parameters }, … }
/// RSASSA-PSS parameters ::= SEQUENCE { [0] SEQUENCE { OID of the hash, … } DEFAULT SHA-1, … }
/// ```
fn signature_hash(certificate: &[u8]) -> Option<&[u8]> {
    let (certificate, _) = element(certificate, SEQUENCE)?;
    let (_, after_body) = element(certificate, SEQUENCE)?;
    let (algorithm, _) = element(after_body, SEQUENCE)?;
    let (oid, parameters) = element(algorithm, OBJECT_IDENTIFIER)?;
    if oid != RSA_PSS {
        return Some(oid);
    }
    let (parameters, _) = element(parameters, SEQUENCE)?;
    match element(parameters, FIRST_PARAMETER) {
        Some((hash, _)) => Some(element(element(hash, SEQUENCE)?.0, OBJECT_IDENTIFIER)?.0),
        None => Some(&[0x2B, 14, 3, 2, 26]),
    }
}

/// The content of the DER element of this kind that `input` begins with, and what follows it.
fn element(input: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = input.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7F => (usize::from(first), rest),
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7F))?;
            (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    (found == tag).then(|| rest.split_at_checked(length))?
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A certificate of which only what matters here is there.
    fn certificate(algorithm: &[u8]) -> Vec<u8> {
        let wrap = |tag: u8, content: &[u8]| {
            let length = u16::try_from(content.len()).unwrap().to_be_bytes();
            [&[tag, 0x82], &length[..], content].concat()
        };
        let body = wrap(SEQUENCE, &[0; 300]);
        wrap(SEQUENCE, &[body, wrap(SEQUENCE, algorithm), vec![3, 1, 0]].concat())
    }

    fn with_oid(family: &[u8], last: u8) -> Vec<u8> {
        let length = u8::try_from(family.len() + 1).unwrap();
        certificate(&[&[OBJECT_IDENTIFIER, length], family, &[last], &[5, 0]].concat())
    }

    #[test]
    fn the_end_point_hash_follows_the_signature_and_is_never_weaker_than_sha_256() {
        for (family, last, length) in [
            (RSA, 4, 32),
            (RSA, 5, 32),
            (RSA, 11, 32),
            (RSA, 12, 48),
            (RSA, 13, 64),
            (ECDSA, 1, 32),
            (ECDSA_SHA2, 2, 32),
            (ECDSA_SHA2, 3, 48),
            (ECDSA_SHA2, 4, 64),
        ] {
            let hash = end_point_hash(&with_oid(family, last));
            assert_eq!(hash.map(|hash| hash.len()), Some(length), "{family:?} {last}");
        }
        let ed25519 = with_oid(&[0x2B, 0x65], 0x70);
        assert_eq!(end_point_hash(&ed25519), None);
    }

    #[test]
    fn a_pss_signature_names_its_hash_in_its_parameters() {
        let pss = [&[OBJECT_IDENTIFIER, 9], RSA_PSS].concat();
        let sha384 = [&[SEQUENCE, 15, FIRST_PARAMETER, 13, SEQUENCE, 11, OBJECT_IDENTIFIER, 9], SHA2, &[2]].concat();
        let explicit = certificate(&[pss.clone(), sha384].concat());
        assert_eq!(end_point_hash(&explicit).map(|hash| hash.len()), Some(48));
        let default = certificate(&[pss, vec![SEQUENCE, 0]].concat());
        assert_eq!(end_point_hash(&default).map(|hash| hash.len()), Some(32));
    }

    #[test]
    fn a_broken_certificate_has_no_hash() {
        let whole = with_oid(RSA, 11);
        for length in 0..whole.len() - 20 {
            assert_eq!(end_point_hash(&whole[..length]), None);
        }
        assert_eq!(end_point_hash(&[SEQUENCE, 0x84, 0xFF, 0xFF, 0xFF, 0xFF]), None);
    }
}
