//! TLS as libpq's `sslmode` has it.
//!
//! SCRAM can be bound to the session (`tls-server-end-point`, RFC 5929): both sides mix a hash of the server's
//! certificate into the proof, and someone between the two, who must show another certificate, is found out. This is
//! why the handshake's signature is checked even where any certificate will do.

use std::path::Path;
use std::sync::Arc;

use ring::digest;
use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, SupportedProtocolVersion};

use super::conninfo::{ChannelBinding, RootCert, SslMode, SslNegotiation, TlsOptions, TlsVersion};
use super::server_error::WireError;
use crate::source::tls::{Trust, Verifier, file_roots, identity, system_roots};

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
            let (chain, private) = identity(certificate, key, ("sslcert", "sslkey"))?;
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
        RootCert::System => Some(system_roots("sslrootcert")?),
        RootCert::File(path) if path.exists() => Some(file_roots(path, "sslrootcert")?),
        RootCert::Default(Some(path)) if path.exists() => Some(file_roots(path, "sslrootcert")?),
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
        RootCert::Default(_) if options.mode == SslMode::VerifyFull => Some(system_roots("sslrootcert")?),
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
