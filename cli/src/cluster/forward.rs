//! One port of one pod on loopback, by `kubectl port-forward`, for as long as the value lives.

use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdout};

use super::kubectl::{Failure, Kubectl, failure, not_run};

/// A forward that does not stand by then never will: it is one connection through the API server.
const STANDS_WITHIN: Duration = Duration::from_secs(20);

/// Ended with the value.
#[derive(Debug)]
pub(super) struct Forward {
    address: String,
    _child: Child,
    /// Kept open: `kubectl` writes a line for each connection, and ends where nobody could read it.
    _open: (BufReader<ChildStdout>, ChildStderr),
}

impl Forward {
    /// # Errors
    /// It does not come to stand.
    pub(super) async fn to(kubectl: &Kubectl, pod: &Value, port: u16) -> Result<Self, Failure> {
        let pod = format!("pod/{}", super::name(pod));
        let port = format!(":{port}");
        let arguments = ["port-forward", "--address=127.0.0.1", &pod, &port];
        let mut child = kubectl
            .command(&arguments)
            .spawn()
            .map_err(|error| not_run(&error))?;
        let (Some(out), Some(mut err)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(Failure::Other("its output cannot be read".to_owned()));
        };
        let mut lines = BufReader::new(out);
        let mut line = String::new();
        let read = tokio::time::timeout(STANDS_WITHIN, lines.read_line(&mut line));
        match read.await {
            Ok(Ok(_)) if !line.is_empty() => match address(&line) {
                Some(address) => Ok(Self {
                    address,
                    _child: child,
                    _open: (lines, err),
                }),
                None => Err(Failure::Other(format!(
                    "port-forward to {pod} says {line:?} instead of its port"
                ))),
            },
            Ok(_) => {
                let mut reason = String::new();
                // It has ended: what it said is all there.
                let said = tokio::time::timeout(STANDS_WITHIN, err.read_to_string(&mut reason));
                let _ = said.await;
                Err(failure(&reason))
            }
            Err(_) => Err(Failure::Other(format!(
                "port-forward to {pod} does not stand after {} s",
                STANDS_WITHIN.as_secs()
            ))),
        }
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }
}

/// Of the line `Forwarding from 127.0.0.1:41234 -> 8001`.
fn address(line: &str) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        ["Forwarding", "from", address, "->", _] => Some(address.to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_read_from_what_kubectl_says() {
        assert_eq!(
            address("Forwarding from 127.0.0.1:41234 -> 8001\n").as_deref(),
            Some("127.0.0.1:41234")
        );
        assert_eq!(address("Handling connection for 41234\n"), None);
    }
}
