//! API keys: who may ask, how much, and whose prefixes they share.
//!
//! The file is a JSON list of entries. It holds no key, only the SHA-256 of each, so that reading it lets nobody in; keys are long
//! and random, and need no slower hash. It is read again when it changes.
//!
//! - [`usage`]: what a key has used of its limits.

pub mod usage;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use baton_protocol::hash::HashKey;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use serde::Deserialize;

use crate::followed::{Followed, Unusable};
use crate::openai::error::ApiError;
use tokio::time::Instant;
use usage::{Limits, Usage, Using};

/// Keys of a file at most: what it takes to read one is bounded.
const MAX_KEYS: usize = 10_000;

/// One entry of the file.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Entry {
    /// Who it is for, for logs. Unique.
    name: String,
    /// `sha256:` and 64 hexadecimal digits.
    hash: String,
    /// Keys of the same salt share cached prefixes. Absent: the key's name, so that it shares with nobody. Empty: shares with all
    /// others whose salt is empty.
    cache_salt: Option<String>,
    /// The most urgent `priority` that its requests may have, as requests say it (smaller is more urgent). Absent: any.
    most_urgent_priority: Option<i32>,
    /// Requests served or waiting at a time. Absent: as many as the router takes.
    max_in_flight: Option<u32>,
    /// Absent: no limit.
    requests_per_minute: Option<u32>,
}

/// One key, as requests are served under it.
#[derive(Debug)]
pub struct ApiKey {
    pub name: String,
    tenant: String,
    salts: SaltKey,
    /// As requests say it: smaller is more urgent.
    pub most_urgent_priority: Option<i32>,
    limits: Limits,
    usage: Arc<Usage>,
}

/// What salts are made with. Of the deployment, so that each of its routers makes the same ones and nobody else can.
#[derive(Clone, Copy)]
pub struct SaltKey([u8; 32]);

impl SaltKey {
    pub fn new(deployment: &HashKey) -> Self {
        Self(deployment.derived("baton 2026 cache salt of an API key"))
    }
}

impl fmt::Debug for SaltKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("SaltKey(secret)")
    }
}

/// A SHA-256.
type Digest = [u8; SHA256_OUTPUT_LEN];

/// The keys in force. They are found by the digest of what a request carries: whoever measures how a digest compares learns of a
/// digest, which opens nothing.
#[derive(Debug, Default)]
pub struct ApiKeys {
    by_digest: HashMap<Digest, Arc<ApiKey>>,
    by_name: HashMap<String, Arc<ApiKey>>,
}

/// Keys of a file, kept current.
pub type KeyFile = Followed<ApiKeys>;

/// Reads a file of keys for the first time.
///
/// # Errors
/// It cannot be read, or is no such file.
pub fn open(path: PathBuf, salts: SaltKey) -> Result<KeyFile, Unusable> {
    Followed::open(
        "API keys (--api-keys-file)",
        vec![path.clone()],
        move |contents, before| {
            let contents = contents.first().map_or(&[][..], Vec::as_slice);
            ApiKeys::parse(contents, before, salts)
                .map_err(|reason| format!("{}: {reason}", path.display()))
        },
    )
}

impl ApiKeys {
    /// Keys that were there before keep what they have used.
    fn parse(contents: &[u8], before: Option<&Self>, salts: SaltKey) -> Result<Self, String> {
        let entries: Vec<Entry> = serde_json::from_slice(contents)
            .map_err(|error| format!("not a list of {{\"name\", \"hash\", …}}: {error}"))?;
        if entries.len() > MAX_KEYS {
            return Err(format!(
                "{} keys are too many: at most {MAX_KEYS}",
                entries.len()
            ));
        }
        let mut keys = Self::default();
        for entry in entries {
            let old = before.and_then(|before| before.by_name.get(&entry.name));
            let (digest, key) = ApiKey::new(entry, old, salts)?;
            let key = Arc::new(key);
            let others = [
                keys.by_digest.insert(digest, key.clone()),
                keys.by_name.insert(key.name.clone(), key.clone()),
            ];
            if let Some(other) = others.into_iter().flatten().next() {
                return Err(format!(
                    "keys {:?} and {:?} have the same name or hash: give each its own",
                    other.name, key.name
                ));
            }
        }
        Ok(keys)
    }

    pub fn len(&self) -> usize {
        self.by_digest.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_digest.is_empty()
    }

    /// The key that a request carries.
    ///
    /// # Errors
    /// It carries none, or one that is not known.
    pub fn of(&self, headers: &HeaderMap) -> Result<Arc<ApiKey>, ApiError> {
        let sent = headers
            .get(AUTHORIZATION)
            .ok_or_else(|| ApiError::unauthorized("no API key: send authorization: Bearer KEY"))?;
        let key = bearer(sent.as_bytes()).ok_or_else(|| {
            ApiError::unauthorized("the authorization header is not understood: send Bearer KEY")
        })?;
        let found = self.by_digest.get(&sha256(key));
        found
            .cloned()
            .ok_or_else(|| ApiError::unauthorized("the API key is not known"))
    }
}

/// What follows `Bearer`; the scheme's case does not matter (RFC 9110, 11.1).
pub fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, secret) = header.split_at_checked("Bearer ".len())?;
    let secret = secret.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"Bearer ") && !secret.is_empty()).then_some(secret)
}

fn sha256(bytes: &[u8]) -> Digest {
    let mut words = Digest::default();
    words.copy_from_slice(digest(&SHA256, bytes).as_ref());
    words
}

impl ApiKey {
    /// With the digest that it is found by.
    fn new(
        entry: Entry,
        old: Option<&Arc<Self>>,
        salts: SaltKey,
    ) -> Result<(Digest, Self), String> {
        let name = entry.name;
        if !(1..=64).contains(&name.len()) || name.chars().any(char::is_control) {
            return Err(format!("name {name:?} must have 1 to 64 bytes of text"));
        }
        let told = |field: &str, next: &str| format!("key {name:?}: {field} {next}");
        let digits = entry.hash.strip_prefix("sha256:");
        // A hash of BLAKE3 is as long, and is read from hexadecimal digits.
        let digest = digits.and_then(|digits| blake3::Hash::from_hex(digits).ok());
        let digest = digest.ok_or_else(|| {
            told(
                "hash",
                "must be \"sha256:\" and 64 hexadecimal digits, as sha256sum prints them",
            )
        })?;
        for (field, limit) in [
            ("maxInFlight", entry.max_in_flight),
            ("requestsPerMinute", entry.requests_per_minute),
        ] {
            if limit == Some(0) {
                return Err(told(
                    field,
                    "must be at least 1: to shut a key out, remove it",
                ));
            }
        }
        let usage = old.map_or_else(Arc::default, |old| old.usage.clone());
        let key = Self {
            tenant: entry.cache_salt.unwrap_or_else(|| name.clone()),
            salts,
            most_urgent_priority: entry.most_urgent_priority,
            limits: Limits {
                max_in_flight: entry.max_in_flight,
                requests_per_minute: entry.requests_per_minute,
            },
            usage,
            name,
        };
        Ok((*digest.as_bytes(), key))
    }

    /// A request of the key begins.
    ///
    /// # Errors
    /// 429, with the time after which another one may begin.
    pub fn begin(&self, now: Instant) -> Result<Using, ApiError> {
        self.usage.begin(self.limits, now)
    }

    /// The salt of a request: that of the client within that of its tenant. Both are hashed with their lengths, so that no client
    /// can name the salt of another tenant, and under the deployment's key, so that none can work it out from a tenant's name; empty
    /// only where prefixes are shared with all.
    pub fn cache_salt(&self, sent: &str) -> String {
        if self.tenant.is_empty() && sent.is_empty() {
            return String::new();
        }
        let mut hasher = blake3::Hasher::new_keyed(&self.salts.0);
        hasher.update(&self.tenant.len().to_le_bytes());
        hasher.update(self.tenant.as_bytes());
        hasher.update(sent.as_bytes());
        hasher.finalize().to_hex().to_string()
    }

    /// The priority of a request, as dispatch counts it (larger is more urgent).
    pub fn priority(&self, asked: i32) -> i32 {
        let most = self.most_urgent_priority.map(i32::saturating_neg);
        most.map_or(asked, |most| asked.min(most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the key `secret`, by `printf %s secret | sha256sum`.
    const SECRET: &str = "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    fn salts(key: u8) -> SaltKey {
        SaltKey::new(&HashKey::from_bytes(&[key; 32]))
    }

    fn keys(text: &str) -> Result<ApiKeys, String> {
        ApiKeys::parse(text.as_bytes(), None, salts(1))
    }

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())])
    }

    fn entry(fields: &str) -> String {
        format!(r#"[{{"name": "a", "hash": "{SECRET}"{fields}}}]"#)
    }

    #[test]
    fn only_the_key_whose_hash_is_there_opens() {
        let keys = keys(&entry("")).unwrap();
        for value in ["Bearer secret", "bearer secret", "Bearer  secret "] {
            assert_eq!(keys.of(&headers(value)).unwrap().name, "a", "{value}");
        }
        for value in [
            "Bearer other",
            "Bearer",
            "Bearer ",
            "Basic secret",
            "secret",
            SECRET,
        ] {
            let error = keys.of(&headers(value)).unwrap_err();
            assert_eq!(
                (error.status, error.kind(), error.code.as_deref()),
                (401, "authentication_error", Some("invalid_api_key")),
                "{value}"
            );
            assert!(!error.message.contains("secret"));
        }
        assert_eq!(keys.of(&HeaderMap::new()).unwrap_err().status, 401);
    }

    #[test]
    fn a_file_that_is_wrong_names_the_key_and_the_field() {
        for (text, expected) in [
            ("{}", "not a list of"),
            (&entry(r#", "colour": 1"#), "unknown field `colour`"),
            (
                &entry(r#", "maxInFlight": 0"#),
                "key \"a\": maxInFlight must be at least 1",
            ),
            (&entry(r#", "requestsPerMinute": 0"#), "requestsPerMinute"),
            (
                r#"[{"name": "a", "hash": "secret"}]"#,
                "key \"a\": hash must be",
            ),
            (
                r#"[{"name": "a", "hash": "sha256:00"}]"#,
                "key \"a\": hash must be",
            ),
            (r#"[{"name": "", "hash": "sha256:00"}]"#, "name \"\" must"),
            (
                &format!("[{0}, {0}]", &entry("")[1..entry("").len() - 1]),
                "the same name or hash",
            ),
        ] {
            let error = keys(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(keys("[]").unwrap().is_empty());
    }

    #[test]
    fn tenants_share_prefixes_only_when_told_to() {
        let salt =
            |fields: &str, sent: &str| keys(&entry(fields)).unwrap().by_name["a"].cache_salt(sent);
        let own = salt("", "");
        assert!(!own.is_empty());
        assert_eq!(
            own,
            salt(r#", "cacheSalt": "a""#, ""),
            "its name is its salt"
        );
        assert_ne!(own, salt(r#", "cacheSalt": "b""#, ""));
        assert_ne!(
            own,
            salt("", "x"),
            "a client's own salt counts within its tenant"
        );
        assert_eq!(salt(r#", "cacheSalt": """#, ""), "");
        // Whoever shares with all cannot ask for a tenant's salt by name, nor can two tenants meet by moving a letter.
        assert_ne!(salt(r#", "cacheSalt": """#, "a"), own);
        assert_ne!(salt(r#", "cacheSalt": """#, &own), own);
        assert_ne!(
            salt(r#", "cacheSalt": "ab""#, "c"),
            salt(r#", "cacheSalt": "a""#, "bc")
        );
    }

    #[test]
    fn a_salt_is_the_deployments_and_outlives_its_routers() {
        let of = |key| {
            let keys = ApiKeys::parse(entry("").as_bytes(), None, salts(key)).unwrap();
            keys.by_name["a"].cache_salt("")
        };
        assert_eq!(of(1), of(1), "each router of the deployment has the same");
        assert_ne!(of(1), of(2), "who does not know the key cannot make it");
        assert!(!format!("{:?}", salts(1)).contains("1, 1"));
    }

    #[test]
    fn a_key_bounds_the_urgency_of_its_requests() {
        let keys = keys(&entry(r#", "mostUrgentPriority": 5"#)).unwrap();
        // In dispatch's order, where 5 of a request is -5.
        assert_eq!(keys.by_name["a"].priority(0), -5);
        assert_eq!(keys.by_name["a"].priority(-9), -9);
        let keys = self::keys(&entry("")).unwrap();
        assert_eq!(keys.by_name["a"].priority(i32::MAX), i32::MAX);
    }

    #[test]
    fn a_changed_file_keeps_what_a_key_has_used() {
        let before = keys(&entry(r#", "maxInFlight": 1"#)).unwrap();
        let now = Instant::now();
        let place = before.by_name["a"].begin(now).unwrap();
        let after = ApiKeys::parse(
            entry(r#", "maxInFlight": 1"#).as_bytes(),
            Some(&before),
            salts(1),
        );
        let after = after.unwrap();
        assert!(after.by_name["a"].begin(now).is_err());
        drop(place);
        assert!(after.by_name["a"].begin(now).is_ok());
    }

    #[test]
    fn a_refused_file_changes_no_limit_of_a_key_before_its_fault() {
        let before = keys(&entry(r#", "maxInFlight": 1"#)).unwrap();
        let good = &entry("");
        let refused = format!(
            r#"{}, {{"name": "", "hash": ""}}]"#,
            &good[..good.len() - 1]
        );
        assert!(ApiKeys::parse(refused.as_bytes(), Some(&before), salts(1)).is_err());
        let now = Instant::now();
        let _place = before.by_name["a"].begin(now).unwrap();
        assert!(
            before.by_name["a"].begin(now).is_err(),
            "its limit has gone"
        );
    }
}
