//! TLS of the public port: a certificate chain and its key, read again when they change.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::followed::{Followed, Unusable};

/// What new connections are accepted with. Those that are open keep what they began with.
#[derive(Debug)]
pub struct Identity(Arc<ServerConfig>);

/// Certificate and key, kept current.
pub type IdentityFiles = Followed<Identity>;

/// Reads a chain (PEM, the server's certificate first) and its private key (PEM) for the first time.
///
/// # Errors
/// They cannot be read, or do not belong together.
pub fn open(certificate: PathBuf, key: PathBuf) -> Result<IdentityFiles, Unusable> {
    let names = (certificate.display().to_string(), key.display().to_string());
    let what = "TLS (--tls-certificate-file, --tls-key-file)";
    Followed::open(what, vec![certificate, key], move |contents, _| {
        let [certificate, key] = contents else {
            return Err("two files are needed".to_owned());
        };
        Identity::parse(certificate, key)
            .map_err(|reason| format!("{} and {}: {reason}", names.0, names.1))
    })
}

impl Identity {
    /// # Errors
    /// No certificate, no key, or two that do not belong together.
    fn parse(certificate: &[u8], key: &[u8]) -> Result<Self, String> {
        let chain: Vec<_> = CertificateDer::pem_slice_iter(certificate)
            .collect::<Result<_, _>>()
            .map_err(|error| format!("the certificate is not PEM: {error}: give the server's certificate first, then its issuers"))?;
        if chain.is_empty() {
            return Err("no certificate: give one or more PEM blocks named CERTIFICATE".to_owned());
        }
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| {
            format!("the private key is not PEM: {error}: give one PEM block, without a password")
        })?;
        // The provider is said here, so that nothing depends on what other parts of the process have installed.
        let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(|error| format!("certificate and key do not go together: {error}: give the key that the certificate was made for"))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(Arc::new(config)))
    }

    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pem() -> (String, String) {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn a_pair_is_taken_and_anything_else_says_what_is_wrong() {
        let ((certificate, key), (_, other)) = (pem(), pem());
        Identity::parse(certificate.as_bytes(), key.as_bytes()).unwrap();
        for (certificate, key, expected) in [
            ("", key.as_str(), "no certificate"),
            (&certificate, "", "the private key is not PEM"),
            (&certificate, &other, "do not go together"),
            (
                &certificate,
                "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
                "",
            ),
        ] {
            let error = Identity::parse(certificate.as_bytes(), key.as_bytes()).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_broken_pair_leaves_the_last_good_one_in_force() {
        let folder = tempfile::tempdir().unwrap();
        let (certificate, key) = (folder.path().join("tls.crt"), folder.path().join("tls.key"));
        let write = |pair: &(String, String)| {
            std::fs::write(&certificate, &pair.0).unwrap();
            std::fs::write(&key, &pair.1).unwrap();
        };
        let (first, second) = (pem(), pem());
        write(&first);
        let files = open(certificate.clone(), key.clone()).unwrap();
        let before = files.in_force();
        // Half of a change.
        std::fs::write(&certificate, &second.0).unwrap();
        files.look();
        assert!(Arc::ptr_eq(&before, &files.in_force()));
        write(&second);
        files.look();
        assert!(!Arc::ptr_eq(&before, &files.in_force()));
        let missing = open(folder.path().join("none"), key)
            .unwrap_err()
            .to_string();
        assert!(
            missing.contains("--tls-certificate-file") && missing.contains("/none"),
            "{missing}"
        );
    }
}
